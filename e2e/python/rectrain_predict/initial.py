"""Initial values of rows: a pure function of seed, key and column, as in training."""

import numpy as np

_INCREMENT = np.uint64(0x9E3779B97F4A7C15)

# Coefficients of AS 241 (Wichura 1988), highest power first.
_CENTRE = (
    [2509.0809287301227, 33430.57558358813, 67265.7709270087, 45921.95393154987, 13731.69376550946]
    + [1971.5909503065513, 133.14166789178438, 3.3871328727963665],
    [5226.495278852854, 28729.085735721943, 39307.89580009271, 21213.794301586597, 5394.196021424751]
    + [687.1870074920579, 42.31333070160091, 1.0],
)
_MIDDLE = (
    [0.0007745450142783414, 0.022723844989269184, 0.2417807251774506, 1.2704582524523684]
    + [3.6478483247632045, 5.769497221460691, 4.630337846156546, 1.4234371107496835],
    [1.0507500716444169e-09, 0.0005475938084995345, 0.015198666563616457, 0.14810397642748008]
    + [0.6897673349851, 1.6763848301838038, 2.053191626637759, 1.0],
)
_FAR = (
    [2.0103343992922881e-07, 2.7115555687434876e-05, 0.0012426609473880784, 0.026532189526576124]
    + [0.29656057182850487, 1.7848265399172913, 5.463784911164114, 6.657904643501103],
    [2.0442631033899397e-15, 1.421511758316446e-07, 1.8463183175100548e-05, 0.0007868691311456133]
    + [0.014875361290850615, 0.1369298809227358, 0.599832206555888, 1.0],
)


def _mix(word):
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


def _quantile(p):
    """The standard normal quantile."""
    q = p - 0.5
    with np.errstate(invalid="ignore", divide="ignore"):
        r = 0.180625 - q * q
        centre = q * np.polyval(_CENTRE[0], r) / np.polyval(_CENTRE[1], r)
        r = np.sqrt(-np.log(np.where(q < 0, p, 1 - p)))
        middle = np.polyval(_MIDDLE[0], r - 1.6) / np.polyval(_MIDDLE[1], r - 1.6)
        far = np.polyval(_FAR[0], r - 5) / np.polyval(_FAR[1], r - 5)
    tail = np.where(r <= 5, middle, far) * np.where(q < 0, -1, 1)
    return np.where(np.abs(q) <= 0.425, centre, tail)


def _rounded(values, value_type):
    """The values as a row of this type holds them."""
    if value_type == "f16":
        return values.astype(np.float16).astype(np.float32)
    if value_type == "bf16":
        bits = values.view(np.uint32)
        bits = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        return (bits & np.uint32(0xFFFF0000)).view(np.float32)
    return values


def initial_values(keys, dim, seed, group):
    """The initial values of rows, [keys, dim]."""
    initializer = group["initializer"]
    (kind, setting), *_ = initializer.items()
    with np.errstate(over="ignore"):
        start = np.uint64(seed) + _INCREMENT
        state = _mix(_mix(np.array([start], np.uint64)) ^ keys.astype(np.uint64))
        counts = np.arange(1, dim + 1, dtype=np.uint64) * _INCREMENT
        words = _mix(state[:, None] + counts[None, :])
    unit = ((words >> np.uint64(12)).astype(np.float64) + 0.5) / float(1 << 52)
    if kind == "constant":
        values = np.full(unit.shape, setting, np.float64)
    elif kind == "uniform":
        values = setting["low"] + (setting["high"] - setting["low"]) * unit
    elif kind == "normal":
        values = setting["standardDeviation"] * _quantile(unit)
    else:
        raise ValueError(f"there is no initializer `{kind}`; use a newer rectrain_predict")
    values = values.astype(np.float32)
    values[:, : group["zeroColumns"]] = 0
    return _rounded(values, group["valueType"])
