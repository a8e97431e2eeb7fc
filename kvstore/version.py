"""The version of the whole distribution; packaging reads it from here without importing anything."""

from typing import Final

DISTRIBUTION: Final = "tiered-kvstore"
# Below 0.17: transformers looks for a distribution's `kernels` package by name and takes a higher version for
# Hugging Face's own.
VERSION: Final = "0.1.0"
