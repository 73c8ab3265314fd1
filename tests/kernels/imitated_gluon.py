"""Gluon kernels run on a CPU as the Python that they are: every address is checked, and programs wait for one another.

    run = Imitation(persistent_decode_kernel);   run[(programs,)](*arguments)       as a launch

Tensors are PyTorch's, layouts are ignored. What is imitated, so far as the persistent decode kernel and rings use it:
  - Memory: each tensor lies in an address space of its own, so a load, store, prefetch or copy that leaves it, by however
    little, raises OutOfBounds. A Sparse tensor may be larger than this machine: untouched elements are 0.
  - 32 bits: a sum or product of them that does not fit raises OverflowError.
  - Programs, and the parts of warp_specialize: threads of which one runs at a time. The turn goes to one drawn at random
    wherever somebody waits, and now and then at a store. The threads of one program are one, so its own races are not seen,
    but for those of copies and products with one another, see imitated_shared.
  - Dependent launches: the kernel before ends at some time; griddepcontrol.wait waits for that, and what is touched ahead of it
    raises TooEarly.
  - Words: the waits that persistent_words writes in PTX, read from that text: which addresses, under which guards.
"""

from __future__ import annotations

import builtins
import inspect
import re
import types
from collections.abc import Callable, Collection
from typing import Any

import torch
from imitated_shared import Barrier, Barriers, Descriptor, Groups, Places, Shared, Turns, of_thread
from imitated_values import LAYOUT, Memory, OutOfBounds, Sparse, T, pair, plain, value_of
from triton.runtime.jit import JITFunction

LOST_BITS = 0x7FFF7FFF  # of a wait that gave up


class TooEarly(Exception):
    """A dependent launch touches what the kernel before may not have written yet."""


# --- the language


class Language:
    """What kernels call gl, and what they import from gluon's modules for Hopper, for one launch."""

    bfloat16, float16, float32 = torch.bfloat16, torch.float16, torch.float32
    int16, int32, int64, uint16, uint32 = torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32
    uint64, num_warps = torch.uint64, staticmethod(lambda: 4)
    constexpr = SliceLayout = BlockedLayout = NVMMADistributedLayout = SwizzledSharedLayout = LAYOUT

    def __init__(
        self, programs: int, seed: int, instead: dict[str, Any], dependent: bool, early: Collection[str] | None
    ) -> None:
        self.memory, self.turns, self.programs, self.instead = Memory(), Turns(seed), programs, instead
        self.places, self.early = Places(), early if dependent else None
        self.before_ended, self.waited = not dependent, set[int]()  # the kernel before; threads that have waited for its end
        if dependent:
            self.turns.coming.append(lambda: setattr(self, "before_ended", True))
        self._made: dict[Any, Callable[..., Any]] = {}
        self.mbarrier = types.SimpleNamespace(
            MBarrierLayout=LAYOUT, init=Barrier.init, arrive=Barrier.arrive, expect=Barrier.expect, wait=Barrier.wait
        )
        self.tma = types.SimpleNamespace(async_copy_global_to_shared=Descriptor.copy)

    def whole_program(self, run: Callable[[], Any]) -> None:
        """What ends before the kernel before has lets the next kernel go on, though that one's results may not be there."""
        run()
        if not self.before_ended or (self.early is not None and of_thread.me not in self.waited):
            raise TooEarly("a program ends without having waited for the kernel before")

    def python(self, kernel: JITFunction) -> Callable[..., Any]:
        """The kernel's Python, which sees this language where the kernel sees Gluon."""
        if kernel not in self._made:
            fn, names = kernel.fn, dict[str, Any]()
            self._made[kernel] = types.FunctionType(fn.__code__, names, fn.__name__, fn.__defaults__, fn.__closure__)
            for name, value in fn.__globals__.items():
                names[name] = self.python(value) if isinstance(value, JITFunction) else getattr(value, "value", value)
            names |= {"gl": self, "tl": self, "range": self.range, "mbarrier": self.mbarrier, "tma": self.tma}
            nothing = dict.fromkeys(("barrier", "fence_async_shared"), lambda: None)
            names |= nothing | {"warpgroup_mma": Groups.mma, "warpgroup_mma_wait": Groups.wait}
            for name, instead in self.instead.items():
                if name in names:
                    names[name] = self.python(instead) if isinstance(instead, JITFunction) else instead
        return self._made[kernel]

    def range(self, *bounds: Any) -> Any:
        return (T(torch.tensor(i, dtype=torch.int32)) for i in builtins.range(*map(int, bounds)))

    static_range = staticmethod(builtins.range)

    def program_id(self, axis: int) -> T:
        return T(torch.tensor(of_thread.program, dtype=torch.int32))

    def num_programs(self, axis: int) -> T:
        return T(torch.tensor(self.programs, dtype=torch.int32))

    def warp_specialize(self, parts: list[tuple[Any, tuple[Any, ...]]], warps: list[int], registers: list[int]) -> None:
        (first, args), *others = parts
        begun = [self.turns.begin(of_thread.program, lambda f=f, a=a: f(*a)) for f, a in others]
        self.waited |= set(begun if of_thread.me in self.waited else ())
        first(*args)
        self.turns.until(lambda: not any(i in self.turns.alive for i in begun))

    def allocate_shared_memory(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
        if dtype == torch.int64:
            return Barriers(Barrier(self.turns) for _ in builtins.range(shape[0]))
        return Shared(torch.full(shape, float("nan"), dtype=dtype), self.places)

    # memory

    def _find(self, address: torch.Tensor, element: torch.dtype) -> tuple[Any, torch.Tensor]:
        """What memory.find gives, for a thread that may touch it by now."""
        if self.early is not None and of_thread.me not in self.waited:
            name = self.memory.name(address)
            if name not in self.early:
                raise TooEarly(f"{name} is touched ahead of griddepcontrol.wait")
        return self.memory.find(address, element)

    def load(self, at: T, mask: Any = None, other: Any = None, cache_modifier: str = "") -> T:
        assert at.element is not None
        here = torch.ones_like(at.v, dtype=torch.bool) if mask is None else value_of(mask).expand(at.v.shape)
        elsewhere = other if other is not None else float("nan") if at.element.is_floating_point else -1
        out = torch.full(at.v.shape, elsewhere, dtype=at.element)
        if here.any():
            tensor, index = self._find(at.v[here], at.element)
            out[here] = tensor.get(index)
        return T(out)

    def store(self, at: T, value: Any, mask: Any = None, cache_modifier: str = "", turn: bool = True) -> None:
        assert at.element is not None
        if turn and self.turns.rng.random() < 1 / 16:
            self.turns.pass_on()
        values = value_of(value, at.element).to(at.element)
        shape = at.v.shape if values.shape in (at.v.shape, ()) else torch.broadcast_shapes(at.v.shape, values.shape)
        here = torch.ones(shape, dtype=torch.bool) if mask is None else value_of(mask).expand(shape)
        if here.any():
            tensor, index = self._find(at.v.expand(shape)[here], at.element)
            tensor.put(index, values.expand(shape)[here])
            self.turns.changed()

    def _atomic(self, change: Callable[[Any, Any], Any]) -> Callable[..., T]:
        def run(at: T, value: Any, mask: Any = None, sem: str = "acq_rel", scope: str = "gpu") -> T:
            self.turns.pass_on()
            before = self.load(at, mask)  # what a thread that is masked out gets is not defined
            here = torch.ones_like(at.v, dtype=torch.bool) if mask is None else value_of(mask).expand(at.v.shape)
            assert len(at.v[here].unique()) == here.sum(), "one thread an address"
            self.store(at, T(change(before.v, value_of(value, at.element))), mask, turn=False)
            return before

        return run

    atomic_add = property(lambda self: self._atomic(lambda old, value: old + value))
    atomic_max = property(lambda self: self._atomic(torch.maximum))
    atomic_xchg = property(lambda self: self._atomic(lambda old, value: value.expand(old.shape)))

    def inline_asm_elementwise(self, text: str, operands: str, args: list[Any], dtype: Any, is_pure: bool, pack: int) -> Any:
        if "griddepcontrol.wait" in text:
            self.turns.until(lambda: self.before_ended)
            self.waited.add(of_thread.me)
            return None
        if "leave L2 first" in text or "griddepcontrol.launch_dependents" in text:  # a mark for the assembler; nobody's to see
            return None
        if "prefetch" in text:
            self._find(args[0].v, torch.bfloat16)
            return None
        if "ld.relaxed.gpu.global.v2.b64" in text:
            return self._look(text, args)
        if "ld.acquire" in text:
            at, target, lost, patience = args
            there = self._wait(lambda: self._read(at.v, torch.int32) >= int(target), lost, patience)
            return T(torch.tensor(int(there), dtype=torch.int32))
        seen, at, epoch, lost, patience = args  # one word, loaded before
        word = [seen.v]

        def again() -> bool:
            missing = (word[0] >> 32) != int(epoch)
            if missing.any():
                word[0] = torch.where(missing, self._read(at.v, torch.int64), word[0])
            return not ((word[0] >> 32) != int(epoch)).any()

        return T(word[0].to(torch.int32)) if self._wait(again, lost, patience) else self._lost(seen.v)

    def _read(self, address: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        tensor, index = self._find(address, dtype)
        return tensor.get(index)

    @staticmethod
    def _lost(like: torch.Tensor) -> T:
        return T(torch.full(like.shape, LOST_BITS, dtype=torch.int32))

    def _wait(self, look: Callable[[], Any], lost: T, patience: T) -> bool:
        """Whether what `look` wants came; a Deadlock where nobody is left to bring it, however patient this thread is."""
        gave_up, at = self._find(lost.v, torch.int32)
        for n in builtins.range(1, int(patience) + 1):
            if look():
                return True
            if n == int(patience):
                break
            if not int(gave_up.get(at)):
                self.turns.look_again()
                continue
            if n % 256 == 0:
                return False
            self.turns.pass_on()
        gave_up.put(at, gave_up.get(at) + 1)
        self.turns.changed()
        return False

    def _look(self, text: str, args: list[Any]) -> tuple[T, ...]:
        """Waits for two words at each read of `text`; data of a read under a guard that does not hold is what it says there."""
        reads = re.findall(r"(?:@g(\d+) )?ld\.relaxed\.gpu\.global\.v2\.b64 \{w\d+, w\d+\}, \[\$(\d+)\+(\d+)\];", text)
        guards = re.findall(r"setp\.lt\.s32 g\d+, (\d+), \$\d+;", text)
        otherwise = [int(bits) for bits in re.findall(r"mov\.b32 t, (\d+); mov\.b64 w", text)]
        starts, (epoch, lost, patience), bound = args[:2], args[2:5], args[5:]
        shape = torch.broadcast_shapes(starts[0].v.shape, starts[1].v.shape)
        data: list[torch.Tensor] = []

        def look() -> bool:
            data.clear()
            for i, (guard, operand, offset) in enumerate(reads):
                if guard and int(guards[int(guard)]) >= int(bound[0]):
                    signed = torch.tensor(otherwise[2 * i : 2 * i + 2], dtype=torch.int64).to(torch.int32)
                    data.extend(bits.expand(shape) for bits in signed)
                    continue
                at = starts[int(operand) - 2 * len(reads)].v.expand(shape) + int(offset)
                if (at % 16).any():
                    raise OutOfBounds("two words at once begin at a multiple of 16 bytes")
                both = [self._read(at + 8 * j, torch.int64) for j in (0, 1)]
                if any(((word >> 32) != int(epoch)).any() for word in both):
                    return False
                data.extend(word.to(torch.int32) for word in both)
            return True

        if self._wait(look, lost, patience):
            return tuple(T(d) for d in data)
        return tuple(self._lost(torch.empty(shape)) for _ in builtins.range(2 * len(reads)))

    # values

    @staticmethod
    def associative_scan(x: T, axis: int, combine: Callable[[T, T], T]) -> T:
        parts = [T(part) for part in x.v.unbind(axis)]
        for i in builtins.range(1, len(parts)):
            parts[i] = combine(parts[i - 1], parts[i])
        return T(torch.stack([part.v for part in parts], axis))

    arange = staticmethod(lambda a, b, layout=None: T(torch.arange(a, b, dtype=torch.int32)))
    zeros = staticmethod(lambda shape, dtype, layout: T(torch.zeros(shape, dtype=dtype)))
    full = staticmethod(lambda shape, value, dtype, layout: T(torch.full(shape, value, dtype=dtype)))
    expand_dims = staticmethod(lambda x, axis: T(x.v.unsqueeze(axis), x.element))
    convert_layout = staticmethod(lambda x, layout: x)
    join = staticmethod(lambda a, b: T(torch.stack(pair(a, b), -1)))
    reshape = staticmethod(lambda x, shape: T(x.v.reshape(shape)))
    permute = staticmethod(lambda x, order: T(x.v.permute(order)))
    abs = staticmethod(lambda x: T(x.v.abs()))
    minimum, maximum = staticmethod(plain(torch.minimum)), staticmethod(plain(torch.maximum))
    where = staticmethod(lambda c, a, b: T(torch.where(value_of(c), *pair(a, b))))
    sum = staticmethod(lambda x, axis: T(x.v.sum(axis, dtype=x.v.dtype)))
    max = staticmethod(lambda x, axis: T(x.v.amax(axis)))
    exp, exp2, rsqrt = (staticmethod(lambda x, f=f: T(f(x.v))) for f in (torch.exp, torch.exp2, torch.rsqrt))


class Imitation:
    """A kernel, launched as Triton launches it. `seed`: who is next where programs wait for one another. `early`: the tensors
    that a dependent launch may touch ahead of griddepcontrol.wait; None: any. `instead`: what stands in for functions that the
    kernel calls, by their names."""

    def __init__(self, kernel: JITFunction, seed: int = 0, early: Collection[str] | None = None, **instead: Any) -> None:
        self.kernel, self.seed, self.early, self.instead = kernel, seed, early, instead

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(
            *args: Any, num_warps: int = 4, launch_cooperative_grid: bool = False, launch_pdl: bool = False, **named: Any
        ) -> None:
            self.seed += 1
            language = Language(grid[0], self.seed, self.instead, launch_pdl, self.early)
            signature = inspect.signature(self.kernel.fn)
            bound = signature.bind(*args, **named).arguments
            for name, value in bound.items():
                if "constexpr" not in str(signature.parameters[name].annotation):
                    bound[name] = self._argument(language, name, value)
            run = language.python(self.kernel)
            for program in range(grid[0]):
                language.turns.begin(program, lambda: language.whole_program(lambda: run(**bound)))
            language.turns.run()

        return launch

    @staticmethod
    def _argument(language: Language, name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor | Sparse):
            return language.memory.pointer(name, value)
        if isinstance(value, float):
            return T(torch.tensor(value, dtype=torch.float32))
        if isinstance(value, int):  # 64 bits only where 32 do not do
            return T(torch.tensor(value, dtype=torch.int32 if -(2**31) <= value < 2**31 else torch.int64))
        return Descriptor(value)
