"""The damage that the vLLM tests do is damage."""

from pathlib import Path

import numpy as np

from tests_vllm.damage import flip_signs, shuffle_region
from tiers.region import Region

PAGE = 4096


def test_flipped_signs_change_numbers_and_spare_the_head_of_each_page(tmp_path: Path) -> None:
    numbers = np.ones(2 * PAGE // 4, np.float32)
    (tmp_path / "a.seg").write_bytes(numbers.tobytes())
    (tmp_path / "index.mdb").write_bytes(numbers.tobytes())
    flipped = flip_signs(tmp_path, ".seg")
    after = np.fromfile(tmp_path / "a.seg", np.float32).reshape(2, -1)
    assert (after[:, :256] == 1).all()
    assert (after[:, 256:] == -1).all()
    assert flipped == after[:, 256:].size
    assert (tmp_path / "index.mdb").read_bytes() == numbers.tobytes()


def test_a_shuffled_region_keeps_its_header_and_generations(tmp_path: Path, shm_dir: Path) -> None:
    region = Region.create(shm_dir / "region", 4 * PAGE, epoch=7)
    region.view(PAGE, PAGE)[:] = bytes(range(256)) * 16
    generation = region.generation(PAGE)
    shuffle_region(shm_dir)
    assert bytes(region.view(PAGE, PAGE)) == bytes(reversed(range(256))) * 16
    assert region.generation(PAGE) == generation
    Region.attach(shm_dir / "region", 7).close()
    region.close()
    (shm_dir / "region").unlink()
