"""Rows of a weight in codes, unpacked: a decode step wants a handful, for which torch starts ten operations."""

from __future__ import annotations

from numba import njit


@njit(
    ["void(uint8[:, ::1], float32[:, ::1], float32[:, ::1], int64[::1], float32[:, ::1])",
     "void(int8[:, ::1], float32[:, ::1], float32[:, ::1], int64[::1], float32[:, ::1])"],
    nogil=True,
    cache=True,
)  # fmt: skip
def unpack_rows(codes, scale, shift, index, out):
    """out [n, in] float32 = codes * scale + shift, rounded twice, of the rows ``index`` [n].

    codes [V, in]; scale and shift [V, groups], shift [0, 0] for none.
    """
    size = codes.shape[1] // scale.shape[1]
    for n in range(index.shape[0]):
        row = index[n]
        for g in range(scale.shape[1]):
            factor = scale[row, g]
            added = shift[row, g] if shift.shape[0] else scale.dtype.type(0.0)
            for i in range(g * size, (g + 1) * size):
                out[n, i] = codes[row, i] * factor + added
