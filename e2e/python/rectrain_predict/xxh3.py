"""XXH3-64 with a seed, in plain Python. The vectors in model.json test it."""

M64 = (1 << 64) - 1
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
P32_1, P32_2, P32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
P64_1, P64_2, P64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
P64_4, P64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5


def _read(data, at, size=8):
    return int.from_bytes(data[at : at + size], "little")


def _fold(left, right):
    product = left * right
    return (product & M64) ^ (product >> 64)


def _rotate(value, bits):
    return ((value << bits) | (value >> (64 - bits))) & M64


def _avalanche(value):
    value ^= value >> 37
    value = value * 0x165667919E3779F9 & M64
    return value ^ (value >> 32)


def _avalanche_xxh64(value):
    value ^= value >> 33
    value = value * P64_2 & M64
    value ^= value >> 29
    value = value * P64_3 & M64
    return value ^ (value >> 32)


def _up_to_16(data, seed):
    length = len(data)
    if length > 8:
        flip_1 = ((_read(SECRET, 24) ^ _read(SECRET, 32)) + seed) & M64
        flip_2 = ((_read(SECRET, 40) ^ _read(SECRET, 48)) - seed) & M64
        low = _read(data, 0) ^ flip_1
        high = _read(data, length - 8) ^ flip_2
        swapped = int.from_bytes(low.to_bytes(8, "little"), "big")
        return _avalanche((length + swapped + high + _fold(low, high)) & M64)
    if length >= 4:
        seed ^= int.from_bytes((seed & 0xFFFFFFFF).to_bytes(4, "little"), "big") << 32
        first, last = _read(data, 0, 4), _read(data, length - 4, 4)
        flip = ((_read(SECRET, 8) ^ _read(SECRET, 16)) - seed) & M64
        value = flip ^ (last + (first << 32))
        value ^= _rotate(value, 49) ^ _rotate(value, 24)
        value = value * 0x9FB21C651E98DF25 & M64
        value ^= (value >> 35) + length
        value = value * 0x9FB21C651E98DF25 & M64
        return value ^ (value >> 28)
    if length > 0:
        combined = (data[0] << 16) | (data[length >> 1] << 24) | data[length - 1] | (length << 8)
        flip = ((_read(SECRET, 0, 4) ^ _read(SECRET, 4, 4)) + seed) & M64
        return _avalanche_xxh64(combined ^ flip)
    return _avalanche_xxh64(seed ^ _read(SECRET, 56) ^ _read(SECRET, 64))


def _mix_16(data, at, secret_at, seed):
    low = _read(data, at) ^ ((_read(SECRET, secret_at) + seed) & M64)
    high = _read(data, at + 8) ^ ((_read(SECRET, secret_at + 8) - seed) & M64)
    return _fold(low, high)


def _up_to_128(data, seed):
    length = len(data)
    total = length * P64_1
    for pair in range((length - 1) // 32, -1, -1):
        total += _mix_16(data, 16 * pair, 32 * pair, seed)
        total += _mix_16(data, length - 16 * (pair + 1), 32 * pair + 16, seed)
    return _avalanche(total & M64)


def _up_to_240(data, seed):
    length = len(data)
    total = length * P64_1
    for block in range(8):
        total += _mix_16(data, 16 * block, 16 * block, seed)
    total = _avalanche(total & M64)
    for block in range(8, length // 16):
        total += _mix_16(data, 16 * block, 16 * (block - 8) + 3, seed)
    total += _mix_16(data, length - 16, 136 - 17, seed)
    return _avalanche(total & M64)


def _accumulate(lanes, data, at, secret, secret_at):
    for lane in range(8):
        value = _read(data, at + 8 * lane)
        keyed = value ^ _read(secret, secret_at + 8 * lane)
        lanes[lane ^ 1] = (lanes[lane ^ 1] + value) & M64
        lanes[lane] = (lanes[lane] + (keyed & 0xFFFFFFFF) * (keyed >> 32)) & M64


def _long(data, seed):
    secret = b"".join(
        ((_read(SECRET, at) + seed) & M64).to_bytes(8, "little")
        + ((_read(SECRET, at + 8) - seed) & M64).to_bytes(8, "little")
        for at in range(0, 192, 16)
    )
    lanes = [P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1]
    stripes = (192 - 64) // 8
    block = 64 * stripes
    blocks = (len(data) - 1) // block
    for number in range(blocks):
        for stripe in range(stripes):
            _accumulate(lanes, data, number * block + 64 * stripe, secret, 8 * stripe)
        for lane in range(8):
            value = lanes[lane] ^ (lanes[lane] >> 47) ^ _read(secret, 192 - 64 + 8 * lane)
            lanes[lane] = value * P32_1 & M64
    for stripe in range((len(data) - 1 - block * blocks) // 64):
        _accumulate(lanes, data, blocks * block + 64 * stripe, secret, 8 * stripe)
    _accumulate(lanes, data, len(data) - 64, secret, 192 - 64 - 7)
    total = len(data) * P64_1
    for pair in range(4):
        left = lanes[2 * pair] ^ _read(secret, 11 + 16 * pair)
        right = lanes[2 * pair + 1] ^ _read(secret, 11 + 16 * pair + 8)
        total += _fold(left, right)
    return _avalanche(total & M64)


def xxh3_64(data, seed=0):
    """The hash of bytes."""
    if len(data) <= 16:
        return _up_to_16(data, seed)
    if len(data) <= 128:
        return _up_to_128(data, seed)
    if len(data) <= 240:
        return _up_to_240(data, seed)
    return _long(data, seed)
