"""Eigenvalues and singular values of a whole matrix, or of a band, in one function (LAPACK).

The matrix comes as tiles, of which those that are zero may be absent. Values of a narrow band take LAPACK's band storage: n b numbers
instead of n², and less time where there are more than some 16 tiles on the diagonal: LAPACK's reductions of bands rotate one element after
another (n = 2,000 with b = 200: 1.1 CPU seconds for the eigenvalues of the band, 0.7 for those of a dense matrix). With vectors dense
algorithms are always faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ephemeron.errors import NotConverged, NotFinite, NotHermitian
from ephemeron.linalg.kernels.lapack import lapack
from ephemeron.linalg.kernels.orthogonal import hermitian_tile

Array = np.ndarray[Any, np.dtype[Any]]
Tiles = Mapping[tuple[int, int], Array]
NARROW = 16
"""Tile columns beyond which a band of one tile beside the diagonal is narrow."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """A matrix, or a band, as tiles."""

    shape: tuple[int, int]
    """Rows and columns."""
    tile: int
    """Rows and columns of a tile."""
    tiles: Tiles
    """By index; absent ones are zero."""
    is_half: bool = False
    """Whether it is the lower half of a Hermitian band."""

    @property
    def is_narrow(self) -> bool:
        """Whether all tiles are on two diagonals, of many."""
        return self.shape[1] > NARROW * self.tile and all(abs(i - j) <= 1 for i, j in self.tiles)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the values."""
        return next(iter(self.tiles.values())).dtype

    def dense(self) -> Array:
        """The whole matrix, in Fortran order."""
        made = np.zeros(self.shape, self.dtype, order="F")
        for (i, j), tile in self.tiles.items():
            made[i * self.tile : i * self.tile + tile.shape[0], j * self.tile : j * self.tile + tile.shape[1]] = tile
        if not np.isfinite(made).all():
            row, column = (int(x[0]) for x in np.nonzero(~np.isfinite(made)))
            raise NotFinite(f"the value at {row}, {column} is {made[row, column]}", kernel="lapack", position=row)
        return made

    def banded(self, *, lower: bool) -> Array:
        """Diagonals as LAPACK stores them: from the main diagonal down, or from the uppermost to the main one."""
        n, width = self.shape[1], self.tile
        made = np.zeros((width + 1, n), self.dtype, order="F")
        for (i, j), tile in self.tiles.items():
            for column in range(tile.shape[1]):
                whole, top = j * width + column, i * width
                first = max(top, whole if lower else whole - width)
                last = min(top + tile.shape[0], whole + width + 1 if lower else whole + 1)
                at = first - whole + (0 if lower else width)
                if last > first:
                    made[at : at + last - first, whole] = tile[first - top : last - top, column]
        return made


def hermitian_eigen(blocks: Blocks) -> tuple[Array, Array]:
    """Eigenvalues (1 × n, ascending) and eigenvectors (n × n) of a Hermitian matrix, or of the lower half of a band.

    Raises:
        NotConverged, NotFinite, NotHermitian: as they say.
    """
    v = _hermitian(blocks)
    return _eigen(v, b"V")[None, :], v


def hermitian_eigenvalues(blocks: Blocks) -> tuple[Array]:
    """Eigenvalues (1 × n, ascending), as of `hermitian_eigen`."""
    if blocks.is_narrow:
        return banded_eigenvalues(blocks)
    return (_eigen(_hermitian(blocks), b"N")[None, :],)


def banded_eigenvalues(blocks: Blocks) -> tuple[Array]:
    """Eigenvalues (1 × n, ascending) of the lower half of a band, in band storage (LAPACK sbev, hbev)."""
    band = blocks.banded(lower=True)
    width, n = band.shape[0] - 1, band.shape[1]
    is_complex, real = np.iscomplexobj(band), np.dtype(band.dtype.char.lower())
    w, work = np.zeros(n, real), [np.zeros(n, band.dtype)] if is_complex else []
    _lapack(
        "hbev" if is_complex else "sbev",
        band.dtype,
        b"N",
        b"L",
        n,
        width,
        band,
        width + 1,
        w,
        np.zeros(1, band.dtype),
        1,
        *work,
        np.zeros(3 * n, real),
    )
    return (w[None, :],)


def singular_vectors(blocks: Blocks) -> tuple[Array, Array, Array]:
    """U (m × k), singular values (1 × k, descending) and Vᴴ (k × n), k = min(m, n).

    Raises:
        NotConverged, NotFinite: as they say.
    """
    u, s, vh = _singular(blocks.dense(), b"S")
    return u, s[None, :], vh


def singular_values(blocks: Blocks) -> tuple[Array]:
    """Singular values (1 × min(m, n), descending)."""
    if blocks.is_narrow:
        return (band_singular_values(blocks.banded(lower=False))[None, :],)
    return (_singular(blocks.dense(), b"N")[1][None, :],)


def band_singular_values(band: Array) -> Array:
    """Singular values of an upper band (LAPACK gbbrd, bdsqr), descending.

    Args:
        band: (b + 1 × n) from the uppermost diagonal to the main one, in Fortran order; overwritten.
    """
    width, n = band.shape[0] - 1, band.shape[1]
    is_complex, real = np.iscomplexobj(band), np.dtype(band.dtype.char.lower())
    d, e, work = np.zeros(n, real), np.zeros(max(n - 1, 1), real), np.zeros(4 * n, band.dtype)
    nothing, one = np.zeros(1, band.dtype), 1
    rwork = [np.zeros(2 * n, real)] if is_complex else []
    _lapack("gbbrd", band.dtype, b"N", n, n, 0, 0, width, band, width + 1, d, e, nothing, one, nothing, one, nothing, one, work, *rwork)
    none = np.zeros(1, real)
    _lapack("bdsqr", real, b"U", n, 0, 0, 0, d, e, none, one, none, one, none, one, np.zeros(4 * n, real))
    return d


def _eigen(a: Array, job: bytes) -> Array:
    """Eigenvalues, ascending, from the lower half of a Hermitian matrix (LAPACK syevd, heevd), which is overwritten: by the eigenvectors where
    `job` is V."""
    n, is_complex, real = len(a), np.iscomplexobj(a), np.dtype(a.dtype.char.lower())
    w = np.zeros(n, real)
    kinds = (a.dtype, real, np.dtype(np.intc)) if is_complex else (a.dtype, np.dtype(np.intc))
    best = [np.zeros(1, kind) for kind in kinds]
    name = "heevd" if is_complex else "syevd"
    _lapack(name, a.dtype, job, b"L", n, a, n, w, *(x for work in best for x in (work, -1)))
    works = [np.zeros(_length(work), work.dtype) for work in best]
    _lapack(name, a.dtype, job, b"L", n, a, n, w, *(x for work in works for x in (work, len(work))))
    return w


def _singular(a: Array, job: bytes) -> tuple[Array, Array, Array]:
    """U (m × k), singular values, descending, and Vᴴ (k × n) of a matrix (LAPACK gesdd), which is overwritten; `job` is S, or N: values alone."""
    (m, n), is_complex, real = a.shape, np.iscomplexobj(a), np.dtype(a.dtype.char.lower())
    k, most = min(m, n), max(m, n)
    s = np.zeros(k, real)
    u, vh = (np.zeros(shape if job == b"S" else (1, 1), a.dtype, order="F") for shape in ((m, k), (k, n)))
    of_complex = 7 * k if job == b"N" else max(5 * k * k + 5 * k, 2 * most * k + 2 * k * k + k)
    more = [*([np.zeros(of_complex, real)] if is_complex else []), np.zeros(8 * k, np.intc)]
    best = np.zeros(1, a.dtype)
    _lapack("gesdd", a.dtype, job, m, n, a, m, s, u, len(u), vh, len(vh), best, -1, *more)
    work = np.zeros(_length(best), a.dtype)
    _lapack("gesdd", a.dtype, job, m, n, a, m, s, u, len(u), vh, len(vh), work, len(work), *more)
    return u, s, vh


def _length(best: Array) -> int:
    """Of work space that LAPACK asked for: in single precision its answer is rounded."""
    asked = best[0].real
    return int(asked) if best.dtype.kind == "i" else int(np.nextafter(asked, asked.dtype.type(np.inf))) + 1


def _lapack(name: str, dtype: np.dtype[Any], *arguments: bytes | int | Array) -> None:
    info = lapack(name, dtype, *arguments)
    if info:
        raise NotConverged(f"{name} returned {info}", kernel=name)


def _hermitian(blocks: Blocks) -> Array:
    """The matrix, of which solvers read the lower half; where it is not half a band, both halves are compared."""
    if not blocks.is_half:
        for i, j in blocks.tiles:
            if i >= j:
                zero = np.zeros(blocks.tiles[i, j].shape[::-1], blocks.dtype)
                try:
                    hermitian_tile(blocks.tiles[i, j], blocks.tiles.get((j, i), zero))
                except (NotHermitian, NotFinite) as error:
                    raise error.at(f"tile {i}, {j}") from None
    return blocks.dense()
