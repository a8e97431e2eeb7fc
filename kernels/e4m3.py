"""Float8 e4m3 (the kind without infinities, float8_e4m3fn) to and from float32, in integer arithmetic inside a kernel.

float32: sign 1, exponent 8 (bias 127), mantissa 23;  e4m3: sign 1, exponent 4 (bias 7), mantissa 3. Works where the
hardware has no such type (sm_80), and in Triton's interpreter, whose own conversion loses a carry.
"""

import triton
import triton.language as tl


@triton.jit
def to_e4m3(numbers):  # type: ignore[no-untyped-def]
    """Float32 to the bits of float8 e4m3 to the nearest, ties to even, saturating. NaN must not come in."""
    bits = numbers.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 e4m3 counts in steps of 2^-9, as float32 does at 2^14.
    subnormal = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.minimum(tl.where(magnitude < (121 << 23), subnormal, normal), 0x7E)
    return ((bits >> 24) & 0x80) | code


@triton.jit
def from_e4m3(code):  # type: ignore[no-untyped-def]
    """The bits of float8 e4m3, none of them NaN, to float32; exact."""
    magnitude = code & 0x7F
    normal = (magnitude << 20) + (120 << 23)
    subnormal = (magnitude.to(tl.float32) * 0.001953125).to(tl.int32, bitcast=True)
    return (tl.where(magnitude < 8, subnormal, normal) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)
