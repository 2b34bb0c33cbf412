"""Ranks in a grid: a group for each line along each dimension."""

import math
import threading

import numpy

from cdist import groups
from cdist.subgroups import new_group

__all__ = ["DeviceMesh", "init_device_mesh"]

_current = threading.local()


class DeviceMesh:
    """A grid of global ranks with named dimensions.

    Args:
        device_type: "cpu" or "cuda".
        mesh: nested lists or an integer array of global ranks.
        mesh_dim_names: one name for each dimension.
        backend_override: backend of the groups: a dict from dimension (index or name) to a backend's name.

    Every rank of the default group makes it; the groups along the dimensions are made at once.

    """

    def __init__(
        self, device_type, mesh=None, *, mesh_dim_names=None, backend_override=None, _groups=None, _root=None
    ):
        self.device_type = device_type
        if mesh is None:
            mesh = numpy.arange(groups.get_world_size())
        self.mesh = numpy.array(mesh.tolist() if hasattr(mesh, "tolist") else mesh, dtype=numpy.int64)
        self.mesh_dim_names = tuple(mesh_dim_names) if mesh_dim_names else None
        if self.mesh_dim_names and len(self.mesh_dim_names) != self.mesh.ndim:
            raise RuntimeError(
                f"{len(self.mesh_dim_names)} mesh_dim_names for a mesh of {self.mesh.ndim} dimensions"
            )
        if len(set(self.mesh.ravel().tolist())) != self.mesh.size:
            raise RuntimeError("a rank stands twice in the mesh")
        if self.mesh.size and (self.mesh.max() >= groups.get_world_size() or self.mesh.min() < 0):
            raise RuntimeError(f"Mesh should not be bigger than default world size {groups.get_world_size()}")
        place = numpy.argwhere(self.mesh == groups.get_rank())
        self._coordinate = tuple(place[0].tolist()) if len(place) else None
        self._groups = self._make_groups(backend_override or {}) if _groups is None else _groups
        self._flattened: dict = {}
        self._root = self if _root is None else _root  # what flattened meshes are known to by name

    def _name(self, dim):
        return self.mesh_dim_names[dim] if self.mesh_dim_names else None

    def _make_groups(self, overrides):
        made = []
        for dim in range(self.ndim):
            backend = overrides.get(dim, overrides.get(self._name(dim)))
            backend = backend[0] if isinstance(backend, tuple) else backend
            lines = numpy.moveaxis(self.mesh, dim, -1).reshape(-1, self.mesh.shape[dim]).tolist()
            mine = None
            for line in lines:
                got = new_group(
                    line, backend=backend, group_desc=f"mesh_{self._name(dim) or dim}", sort_ranks=False
                )
                if groups.get_rank() in line:
                    mine = got
            made.append(mine)
        return made

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return self.mesh.ndim

    @property
    def shape(self) -> tuple:
        """Extent of each dimension."""
        return self.mesh.shape

    def size(self, mesh_dim=None) -> int:
        """Return the number of ranks, or the extent of one dimension."""
        return int(self.mesh.size if mesh_dim is None else self.mesh.shape[self._dim(mesh_dim)])

    def _dim(self, dim):
        if isinstance(dim, int):
            if not -self.ndim <= dim < self.ndim:
                raise IndexError(f"dimension {dim} of a mesh of {self.ndim}")
            return dim % self.ndim
        if not self.mesh_dim_names or dim not in self.mesh_dim_names:
            raise KeyError(f"Invalid mesh_dim_name {dim!r}: the mesh has {self.mesh_dim_names}")
        return self.mesh_dim_names.index(dim)

    def get_group(self, mesh_dim=None):
        """Return this rank's group along a dimension: index or name; a mesh of one dimension needs none."""
        if mesh_dim is None:
            if self.ndim != 1:
                raise RuntimeError(f"the mesh has {self.ndim} dimensions: say which one (mesh_dim)")
            mesh_dim = 0
        if isinstance(mesh_dim, str) and (flat := self._find_flattened(mesh_dim)) is not None:
            return flat.get_group()
        return self._groups[self._dim(mesh_dim)]

    def get_all_groups(self) -> list:
        """Return this rank's group of each dimension."""
        return list(self._groups)

    def get_rank(self) -> int:
        """Return this process's global rank."""
        return groups.get_rank()

    def get_local_rank(self, mesh_dim=None) -> int:
        """Return this rank's place along a dimension."""
        if mesh_dim is None:
            if self.ndim != 1:
                raise RuntimeError(f"the mesh has {self.ndim} dimensions: say which one (mesh_dim)")
            mesh_dim = 0
        if self._coordinate is None:
            raise RuntimeError("this rank is not in the mesh")
        return self._coordinate[self._dim(mesh_dim)]

    def get_coordinate(self):
        """Return this rank's place as a tuple, or None outside the mesh."""
        return self._coordinate

    def __getitem__(self, names):
        """Return the mesh of the given dimension names that this rank is in."""
        names = (names,) if isinstance(names, str) else tuple(names)
        if len(names) == 1 and (flat := self._find_flattened(names[0])) is not None:
            return flat
        dims = [self._dim(name) for name in names]
        if dims != sorted(set(dims)):
            raise KeyError(
                f"Invalid mesh_dim_names {names}: they must be in the mesh's order {self.mesh_dim_names}"
            )
        if self._coordinate is None:
            raise RuntimeError("this rank is not in the mesh")
        at = tuple(slice(None) if dim in dims else self._coordinate[dim] for dim in range(self.ndim))
        return DeviceMesh(
            self.device_type, self.mesh[at], mesh_dim_names=names, _groups=[self._groups[d] for d in dims],
            _root=self._root,
        )  # fmt: skip

    def _find_flattened(self, name):
        if self.mesh_dim_names and name in self.mesh_dim_names:
            return None
        return self._flattened.get(name, self._root._flattened.get(name))

    def _flatten(self, mesh_dim_name=None):
        """Return this mesh as one dimension, with a group of all its ranks; the root knows it by its name."""
        name = mesh_dim_name or "_".join(self.mesh_dim_names or map(str, range(self.ndim)))
        if name not in self._flattened:
            ranks = self.mesh.ravel()
            made = new_group(ranks.tolist(), group_desc=f"mesh_{name}", sort_ranks=False)
            self._flattened[name] = DeviceMesh(
                self.device_type, ranks, mesh_dim_names=(name,), _groups=[made], _root=self._root
            )
            self._root._flattened[name] = self._flattened[name]
        return self._flattened[name]

    @staticmethod
    def from_group(group, device_type, mesh=None, *, mesh_dim_names=None):
        """Make a mesh over groups that exist: one group, or a list of one for each dimension of `mesh`."""
        if not isinstance(group, (list, tuple)):
            return DeviceMesh(device_type, group._ranks, mesh_dim_names=mesh_dim_names, _groups=[group])
        if mesh is None:
            raise ValueError("Must pass mesh if passing multiple ProcessGroups")
        return DeviceMesh(device_type, mesh, mesh_dim_names=mesh_dim_names, _groups=list(group))

    def __enter__(self):
        _current.__dict__.setdefault("stack", []).append(self)
        return self

    def __exit__(self, *error):
        _current.stack.pop()

    def __eq__(self, other):
        return isinstance(other, DeviceMesh) and (self.device_type, self.mesh_dim_names) == (
            other.device_type, other.mesh_dim_names) and numpy.array_equal(self.mesh, other.mesh)  # fmt: skip

    def __hash__(self):
        return hash((self.device_type, self.mesh_dim_names, self.mesh.tobytes(), self.mesh.shape))

    def __repr__(self):
        names = f", mesh_dim_names={self.mesh_dim_names}" if self.mesh_dim_names else ""
        return f"DeviceMesh({self.device_type!r}, {self.mesh.tolist()}{names})"


def init_device_mesh(device_type, mesh_shape, *, mesh_dim_names=None, backend_override=None) -> DeviceMesh:
    """Make a mesh of the ranks 0, 1, 2, … in row-major order.

    Calls init_process_group if that was not done yet.

    Args:
        device_type: "cpu" or "cuda", without an index.
        mesh_shape: extents of the dimensions.
        mesh_dim_names: one name for each dimension.
        backend_override: as in DeviceMesh.

    Raises:
        RuntimeError: names that repeat or do not fit the shape; a device index; a mesh bigger than the world.

    """
    shape = tuple(mesh_shape)
    if mesh_dim_names is not None:
        if len(set(mesh_dim_names)) != len(mesh_dim_names):
            raise RuntimeError(f"Each mesh_dim_name must be unique: {mesh_dim_names}")
        if len(mesh_dim_names) != len(shape):
            raise RuntimeError(
                f"mesh_shape and mesh_dim_names should have same length: {shape}, {mesh_dim_names}"
            )
    if not isinstance(device_type, str) or not device_type.isalpha():
        raise RuntimeError(f"device_type must be a type without an index, got {device_type!r}")
    if not groups.is_initialized():
        groups.init_process_group()
    if math.prod(shape) > groups.get_world_size():
        raise RuntimeError(
            f"Mesh should not be bigger than default world size {groups.get_world_size()}, "
            f"but found {math.prod(shape)}"
        )
    mesh = numpy.arange(math.prod(shape)).reshape(shape)
    return DeviceMesh(device_type, mesh, mesh_dim_names=mesh_dim_names, backend_override=backend_override)
