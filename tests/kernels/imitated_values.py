"""Values and memory of imitated kernels (see imitated_gluon): PyTorch's tensors with a GPU's types and addresses."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

FAR, HALF = 1 << 44, 1 << 43  # between the beginnings of two tensors; each begins in the middle of its space


class OutOfBounds(Exception):
    """An access outside the tensor that its pointer was made of."""


class Anything:
    """Layouts: any attribute, index or call of one is one."""

    def __getattr__(self, name: str) -> Anything:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Anything:
        return self


LAYOUT = Anything()


class Sparse:
    """A tensor of which only what is written takes memory."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype, self.values = shape, dtype, dict[int, Any]()
        self.count = int(torch.tensor(shape, dtype=torch.int64).prod())

    def stride(self, dim: int) -> int:
        return int(torch.tensor(self.shape[dim + 1 :], dtype=torch.int64).prod())

    def is_contiguous(self) -> bool:
        return True

    def get(self, index: torch.Tensor) -> torch.Tensor:
        values = [self.values.get(i, 0.0) for i in index.flatten().tolist()]
        return torch.tensor(values, dtype=self.dtype).reshape(index.shape)

    def put(self, index: torch.Tensor, values: torch.Tensor) -> None:
        self.values.update(zip(index.flatten().tolist(), values.flatten().tolist(), strict=True))


class Dense:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.flat, self.dtype, self.count = tensor.view(-1), tensor.dtype, tensor.numel()

    def get(self, index: torch.Tensor) -> torch.Tensor:
        return self.flat[index]

    def put(self, index: torch.Tensor, values: torch.Tensor) -> None:
        self.flat[index] = values


class Memory:
    def __init__(self) -> None:
        self.tensors: list[tuple[str, Any]] = []

    def pointer(self, name: str, tensor: Any) -> T:
        self.tensors.append((name, tensor if isinstance(tensor, Sparse) else Dense(tensor)))
        return T(torch.tensor(len(self.tensors) * FAR + HALF), tensor.dtype)

    def _which(self, address: torch.Tensor) -> int:
        first = int(address.flatten()[0])
        if not 1 <= first // FAR <= len(self.tensors):
            raise OutOfBounds(f"address {first:#x} is of no tensor")
        return first // FAR

    def name(self, address: torch.Tensor) -> str:
        return self.tensors[self._which(address) - 1][0]

    def find(self, address: torch.Tensor, element: torch.dtype) -> tuple[Any, torch.Tensor]:
        """The tensor in which all of these addresses lie, and where in it."""
        which = self._which(address)
        name, tensor = self.tensors[which - 1]
        offset = address - (which * FAR + HALF)
        index = torch.div(offset, element.itemsize, rounding_mode="floor")
        if (index < 0).any() or (index >= tensor.count).any():
            raise OutOfBounds(f"{name}[{int(index.min())} to {int(index.max())}] of {tensor.count} elements")
        if (offset % element.itemsize).any() or element != tensor.dtype:
            raise OutOfBounds(f"{name} is of {tensor.dtype}, and read as {element} at odd places")
        return tensor, index


# --- values


def value_of(x: Any, like: torch.dtype | None = None) -> torch.Tensor:
    if isinstance(x, T):
        return x.v
    if like is not None and (like.is_floating_point or not isinstance(x, float)):
        return torch.tensor(x, dtype=like)
    return torch.tensor(x, dtype=torch.float32 if isinstance(x, float) else torch.bool if isinstance(x, bool) else torch.int32)


def pair(a: Any, b: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in the type that the operation has: constants follow the other, which 0-dimensional tensors of PyTorch would too."""
    x = value_of(a, b.v.dtype if isinstance(b, T) and not isinstance(a, T) else None)
    y = value_of(b, a.v.dtype if isinstance(a, T) and not isinstance(b, T) else None)
    common = torch.promote_types(x.dtype, y.dtype)
    return x.to(common), y.to(common)


def _fits(wide: torch.Tensor) -> torch.Tensor:
    if (wide != wide.to(torch.int32)).any():
        raise OverflowError(f"{int(wide.abs().max())} does not fit in 32 bits")
    return wide.to(torch.int32)


def _number(x: Any) -> int | None:
    """A scalar of 32 bits as Python's, whose arithmetic costs far less than a tensor's."""
    if isinstance(x, T):
        return x.v.item() if x.v.dtype == torch.int32 and x.v.ndim == 0 else None  # type: ignore[return-value]
    return x if type(x) is int else None


def _of_32_bits(i: int) -> torch.Tensor:
    if not -(1 << 31) <= i < 1 << 31:
        raise OverflowError(f"{abs(i)} does not fit in 32 bits")
    return torch.tensor(i, dtype=torch.int32)


def _arithmetic(op: Callable[[Any, Any], Any]) -> Callable[[Any, Any], T]:
    def run(a: Any, b: Any) -> T:
        if isinstance(b, T) and b.element is not None:
            a, b = b, a
        if isinstance(a, T) and a.element is not None:
            return T(op(a.v, value_of(b).to(torch.int64) * a.element.itemsize), a.element)
        if (i := _number(a)) is not None and (j := _number(b)) is not None:
            return T(_of_32_bits(op(i, j)))
        x, y = pair(a, b)
        return T(_fits(op(x.long(), y.long())) if x.dtype == torch.int32 else op(x, y))

    return run


def plain(op: Callable[[Any, Any], Any]) -> Callable[[Any, Any], T]:
    return lambda a, b: T(op(*pair(a, b)))


def _turned(op: Callable[[Any, Any], T]) -> Callable[[Any, Any], T]:
    return lambda a, b: op(b, a)


class T:
    """A tensor or scalar in registers; with `element`, addresses of values of that type."""

    def __init__(self, v: torch.Tensor, element: torch.dtype | None = None) -> None:
        self.v, self.element = v, element

    shape = property(lambda self: tuple(self.v.shape))
    type = property(lambda self: types.SimpleNamespace(layout=LAYOUT))
    dtype = property(lambda self: types.SimpleNamespace(element_ty=self.element) if self.element else self.v.dtype)

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> T:
        return T(self.v.view(dtype) if bitcast else self.v.to(dtype))

    def __bool__(self) -> bool:
        return bool(self.v)

    def __int__(self) -> int:
        return int(self.v)

    __index__ = __int__
    __hash__ = None  # type: ignore[assignment]
    __add__ = __radd__ = _arithmetic(lambda x, y: x + y)
    __sub__, __rsub__ = (f := _arithmetic(lambda x, y: x - y)), _turned(f)
    __mul__ = __rmul__ = _arithmetic(lambda x, y: x * y)
    __truediv__, __rtruediv__ = (f := plain(lambda x, y: x / y)), _turned(f)
    # as C has them: towards zero
    __floordiv__ = plain(lambda x, y: torch.div(x, y, rounding_mode="trunc"))
    __mod__ = plain(torch.fmod)
    __and__ = __rand__ = plain(lambda x, y: x & y)
    __or__ = __ror__ = plain(lambda x, y: x | y)
    __xor__ = __rxor__ = plain(lambda x, y: x ^ y)
    __lshift__, __rshift__ = plain(lambda x, y: x << y), plain(lambda x, y: x >> y)
    __lt__, __le__ = plain(lambda x, y: x < y), plain(lambda x, y: x <= y)
    __gt__, __ge__ = plain(lambda x, y: x > y), plain(lambda x, y: x >= y)
    __eq__, __ne__ = plain(lambda x, y: x == y), plain(lambda x, y: x != y)  # type: ignore[assignment]

    def __neg__(self) -> T:
        return T(-self.v)
