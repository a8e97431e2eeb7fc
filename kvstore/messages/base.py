"""What all messages of the control protocol are made of."""

from typing import Annotated

import msgspec

from kvstore.core.key import MAX_TOKEN_ID

TokenId = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]
# In steps: each lets blocks go later, or sooner, than those that are as likely to be used again.
Priority = Annotated[int, msgspec.Meta(ge=-2, le=2)]


class Message(msgspec.Struct, frozen=True, tag_field="t", forbid_unknown_fields=True):
    """Base of all bodies; the tag is the class name."""
