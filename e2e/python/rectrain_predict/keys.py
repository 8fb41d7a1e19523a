"""Keys of ids: the rules of docs/reference/checkpoint-format.md."""

import re

from .xxh3 import M64, xxh3_64

_CANONICAL = re.compile(rb"0|-?[1-9][0-9]{0,18}")
_FLOAT = re.compile(rb"([+-]?)([0-9]+)(\.([0-9]*))?(?:[eE]([+-]?)([0-9]{1,9}))?")
# The first integer that a 64-bit float may stand for without being it.
_ROUNDED = 1 << 53


class BadId(ValueError):
    """A float that may have lost digits of its integer. Training takes it for a bad row."""


def mix(word):
    """SplitMix64's finalizer."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & M64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & M64
    return word ^ (word >> 31)


def trim(text):
    """Bytes without white space around them, as Rust's `str::trim` removes it."""
    try:
        decoded = text.decode("utf-8")
    except UnicodeDecodeError:
        return text.strip(b" \t\n\r\x0c")
    # Python's own `strip` also removes the separators U+001C to U+001F.
    return decoded.strip(_WHITE_SPACE).encode("utf-8")


_WHITE_SPACE = "\t\n\x0b\x0c\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000"


def _canonical(text):
    """The integer that a text writes, or None."""
    if _CANONICAL.fullmatch(text):
        value = int(text)
        if -(1 << 63) <= value < 1 << 63:
            return value
    return None


def read(text):
    """An id as an integer or bytes. Floats such as 5.0 are integers."""
    text = trim(text)
    value = _canonical(text)
    if value is not None:
        return value
    found = _FLOAT.fullmatch(text)
    if not found:
        return text
    sign, whole, point, fraction, exponent_sign, exponent = found.groups()
    if not point and exponent is None:
        return text
    # `12e5` may be a hexadecimal hash. A point, or a sign in the exponent, tells a float.
    if exponent is not None and not point and not exponent_sign:
        return text
    power = int((exponent_sign or b"") + (exponent or b"0")) - len(fraction or b"")
    magnitude = _integer(whole + (fraction or b""), power)
    if magnitude is None:
        return text
    if magnitude >= _ROUNDED:
        raise BadId(f"{text!r} is a float that may have lost digits; give integers or texts")
    if exponent is not None:
        return -magnitude if sign == b"-" else magnitude
    digits = sign + whole
    value = _canonical(digits)
    if value is not None:
        return value
    return 0 if digits == b"-0" else digits


def _integer(digits, power):
    """digits · 10^power if that is an integer; 2^64 - 1 if it has more than 16 digits."""
    significant = digits.strip(b"0")
    if not significant:
        return 0
    zeros = power + len(digits) - len(digits.rstrip(b"0"))
    if zeros < 0:
        return None
    return int(significant) * 10**zeros if len(significant) + zeros <= 16 else M64


def key_in_table(value, table_seed, buckets):
    """The key of an id in a table. A hashed table has `buckets` keys, any other None."""
    own = key(value, table_seed)
    return own if buckets is None else mix((own % buckets) ^ table_seed)


def key(value, table_seed):
    """The key of an id: an integer, a text, or bytes."""
    if isinstance(value, str):
        value = value.encode("utf-8")
    if isinstance(value, bytes):
        value = read(value)
    else:
        value = int(value)
        if not -(1 << 63) <= value < 1 << 63:
            value = str(value).encode("ascii")
    if isinstance(value, int):
        return mix((value & M64) ^ table_seed)
    return mix(xxh3_64(value, table_seed))
