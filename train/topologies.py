"""TPU slices that need not be there: their chips, and the abstract devices that the TPU compiler compiles for."""

import dataclasses
import math
import os
import re

import jax

from train.exits import UsageError

GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One chip, by its maker's data sheet.

    Attributes:
      flops: operations a second of bfloat16 products.
      hbm_bytes: main memory.
      hbm_bandwidth: bytes a second between it and the units.
      link_bandwidth: bytes a second that leave the chip over all of its links to other chips.
      axes: of a slice's shape.
    """

    flops: float
    hbm_bytes: int
    hbm_bandwidth: float
    link_bandwidth: float
    axes: int


# Google Cloud's pages "TPU v5p", "TPU v5e" and "TPU v6e"; links there are in bits a second.
CHIPS = {
    "v5e": Chip(flops=197e12, hbm_bytes=16 * GIB, hbm_bandwidth=8.1e11, link_bandwidth=200e9, axes=2),
    "v5p": Chip(flops=459e12, hbm_bytes=95 * GIB, hbm_bandwidth=2.765e12, link_bandwidth=600e9, axes=3),
    "v6e": Chip(flops=918e12, hbm_bytes=32 * GIB, hbm_bandwidth=1.6e12, link_bandwidth=448e9, axes=2),
}
# libtpu would ask the cloud's metadata server what this machine is, and complain where there is none.
_OFFLINE = {
    "TPU_SKIP_MDS_QUERY": "1",
    # Compiling needs no TPU that another process could hold.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
}
FORM = "KIND:SHAPE, as v5e:1x1, v5e:2x4, v6e:4x4 or v5p:2x2x1"


@dataclasses.dataclass(frozen=True)
class Topology:
    """A slice by its name.

    Attributes:
      name: as it was given.
      chip: what each of its chips can do.
      shape: chips along each axis.
    """

    name: str
    chip: Chip
    shape: tuple[int, ...]

    @property
    def chips(self) -> int:
        return math.prod(self.shape)

    def devices(self) -> list[jax.Device]:
        """Return the slice's devices, which can be compiled for and hold nothing.

        Raises:
          UsageError: libtpu, which holds the compiler, is not installed, or it knows no such slice.
        """
        for name, value in _OFFLINE.items():
            os.environ.setdefault(name, value)
        from jax.experimental import topologies

        # The compiler's default is a whole host of chips.
        options = {"chips_per_host_bounds": (1, 1, 1)} if self.chips == 1 else {}
        try:
            described = topologies.get_topology_desc(platform="tpu", topology_name=self.name, **options)
        except Exception as error:
            if not has_libtpu():
                raise UsageError(NO_LIBTPU) from error
            if "INVALID_ARGUMENT" not in str(error):
                raise
            reason = str(error).splitlines()[0].removeprefix("INVALID_ARGUMENT: ").rstrip(".")
            raise UsageError(
                f"topology={self.name}: the TPU compiler knows no such slice ({reason}); try another SHAPE, as in "
                f"{FORM}."
            ) from error
        return list(described.devices)


NO_LIBTPU = (
    "the TPU compiler is not installed: make an environment of its own for it (libtpu makes jax look for a TPU first) "
    "and install the extra there, pip install -e '.[tpu-compile]'."
)


def has_libtpu() -> bool:
    """Whether libtpu, which holds the TPU compiler, can be imported."""
    import importlib.util

    return importlib.util.find_spec("libtpu") is not None


def find_topology(name: str) -> Topology:
    """Read the name of a slice; whether the compiler knows its shape is seen when its devices are asked for.

    Raises:
      UsageError: not of the form KIND:SHAPE, a kind without a row in `CHIPS`, or a shape that it does not have.

    Example:
      >>> find_topology("v5e:2x4").chips
      8
    """
    found = re.fullmatch(r"([a-z0-9]+):([1-9][0-9]{0,3}(?:x[1-9][0-9]{0,3}){1,2})", name, re.ASCII)
    if not found:
        raise UsageError(f"topology={name}: wanted {FORM}.")
    kind, shape = found.groups()
    if kind not in CHIPS:
        raise UsageError(f"topology={name}: {kind} is not known. Known: {', '.join(CHIPS)}.")
    lengths = tuple(int(length) for length in shape.split("x"))
    if len(lengths) != CHIPS[kind].axes:
        raise UsageError(f"topology={name}: the shape of a {kind} slice has {CHIPS[kind].axes} axes: {FORM}.")
    return Topology(name, CHIPS[kind], lengths)
