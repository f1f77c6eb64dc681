"""How a pseudo-gradient travels: a ladder from 16 bits to a sixth of a bit a parameter. docs/decisions/036."""

from shoal.codec.api import Codec, codec, codec_of, warm
from shoal.codec.frame import NAMES, BadPayload

__all__ = ["NAMES", "BadPayload", "Codec", "codec", "codec_of", "warm"]
