"""How programs of the persistent decode kernel hand results to one another: words that say themselves when they were written.

A word is 8 bytes, stored and loaded as one: 32 bits of data (two 16-bit values, or one float32) and 32 bits of epoch. Who needs
a result looks at the words themselves until all have the epoch it waits for. So a hand-off is one store to L2 and one load from
it; data and flag cannot come apart, and neither a fence, a counter nor a barrier of the program's threads is in between.

Loads are relaxed at the scope of the GPU, past L1, two words at a time, all of a thread's words in flight together.

Looking is bounded. After `patience` looks a thread counts itself in LOST and takes NaN for data; from then on, in any program,
a wait that is not over within 256 looks ends the same way.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from pdlab.kernels.ring_product import PANEL, stage

NAN = 0x7FFF7FFF  # as float32, and either half as bfloat16 or float16
TOGETHER = gl.constexpr(8)  # panels of an activation that a thread's registers hold as words at once


@gluon.constexpr_function
def _at_most(n, most):
    return min(n, most)


@gluon.constexpr_function
def _waiting(looks, arrived, lost, first):
    """A bounded loop in PTX around `looks`, which end with the predicate `there`; `lost` runs where it gave up.

    `first`: operand number of (epoch, address of LOST, patience).
    """
    return f"""
    mov.u32 n, 0;
    again:
    {looks}
    @there bra arrived;
    add.u32 n, n, 1;
    setp.lt.u32 more, n, ${first + 2};
    @!more bra give_up;
    and.b32 t, n, 255;
    setp.ne.u32 more, t, 0;
    @more bra again;
    ld.relaxed.gpu.global.b32 t, [${first + 1}];
    setp.eq.u32 more, t, 0;
    @more bra again;
    bra lost;
    give_up:
    red.relaxed.gpu.global.add.u32 [${first + 1}], 1;
    lost:
    {lost}
    bra done;
    arrived:
    {arrived}
    done:
    """


@gluon.constexpr_function
def _look(reads, guards=()):
    """PTX that waits for 2 words at each of `reads`, (operand number, offset in bytes), and gives their data in order.

    Operands: the data; then two addresses, the epoch, the address of LOST, patience, and with `guards` a bound: read i happens
    where guards[i][0] is below the bound, and gives guards[i][1:] elsewhere.
    """
    n = 2 * len(reads)
    epoch = n + 2
    text = [f"{{ .reg .b64 w<{n}>; .reg .b32 n, t, d, bad; .reg .pred there, more;"]
    if guards:
        text.append(f".reg .pred g<{len(guards)}>;")
    looks = []
    for i in range(len(reads)):
        guard = ""
        if guards:
            guard = f"@g{i} "
            text.append(f"setp.lt.s32 g{i}, {guards[i][0]}, ${n + 5};")
            for j in range(2):
                text.append(f"mov.b32 t, {guards[i][1 + j]}; mov.b64 w{2 * i + j}, {{t, ${epoch}}};")
        at = f"${n + reads[i][0]}+{reads[i][1]}"
        looks.append(f"{guard}ld.relaxed.gpu.global.v2.b64 {{w{2 * i}, w{2 * i + 1}}}, [{at}];")
    looks.append("mov.b32 bad, 0;")
    for i in range(n):
        looks.append(f"mov.b64 {{t, d}}, w{i}; xor.b32 d, d, ${epoch}; or.b32 bad, bad, d;")
    looks.append("setp.eq.u32 there, bad, 0;")
    arrived = " ".join(f"mov.b64 {{${i}, t}}, w{i};" for i in range(n))
    lost = " ".join(f"mov.b32 ${i}, {NAN};" for i in range(n))
    return "\n".join([*text, _waiting("\n".join(looks), arrived, lost, epoch), "}"])


@gluon.constexpr_function
def _operands(reads, guarded=False):
    return ",".join(["=r"] * (2 * reads) + ["l", "l", "r", "l", "r"] + ["r"] * guarded)


@gluon.constexpr_function
def _panel_reads(panels, last):
    """Two reads of each panel, PANEL columns in words of two: from operand 0 on, but the `last` panel from operand 1."""
    near = [(0, 256 * p + at) for p in range(panels - last) for at in (0, 16)]
    return tuple(near + [(1, at) for at in (0, 16) if last])


@gluon.constexpr_function
def _row_reads(reads):
    return tuple((0, 16 * i) for i in range(reads))


@gluon.constexpr_function
def _part_reads(parts, head):
    """Of each part two channels of its sums, then its maximum and its denominator."""
    return tuple((operand, 8 * (head + 2) * p) for p in range(parts) for operand in (0, 1))


@gluon.constexpr_function
def _part_guards(parts):
    return tuple((p, *values) for p in range(parts) for values in ((0, 0), (0xFF800000, 0)))


@gluon.jit
def word(low, high, epoch):
    """Two 16-bit values and the epoch."""
    data = low.to(gl.uint16, bitcast=True).to(gl.int64) | (high.to(gl.uint16, bitcast=True).to(gl.int64) << 16)
    return data | (epoch.to(gl.int64) << 32)


@gluon.jit
def float_word(value, epoch):
    return value.to(gl.uint32, bitcast=True).to(gl.int64) | (epoch.to(gl.int64) << 32)


@gluon.jit
def halves(data, dtype: gl.constexpr):
    """The two 16-bit values of a word's data."""
    low = data.to(gl.int16).to(dtype, bitcast=True)
    return low, (data >> 16).to(gl.int16).to(dtype, bitcast=True)


@gluon.jit
def interleave(e):
    """2, 4 or 8 tensors [A, B] as one [A, len B], of which column len b + i is e[i][:, b]."""
    if len(e) == 2:
        all = gl.join(e[0], e[1])
    elif len(e) == 4:
        all = gl.join(gl.join(e[0], e[2]), gl.join(e[1], e[3]))
    else:
        even = gl.join(gl.join(e[0], e[4]), gl.join(e[2], e[6]))
        all = gl.join(even, gl.join(gl.join(e[1], e[5]), gl.join(e[3], e[7])))
    return gl.reshape(all, (e[0].shape[0], e[0].shape[1] * len(e)))


@gluon.jit
def eight(d, dtype: gl.constexpr, APART: gl.constexpr):
    """[A, 8 B] of four words' data [A, B] each: pairs are 4 columns apart, or (not APART) neighbours."""
    a, b = halves(d[0], dtype)
    c, e = halves(d[1], dtype)
    f, g = halves(d[2], dtype)
    h, i = halves(d[3], dtype)
    if APART:
        all = interleave((a, c, f, h, b, e, g, i))
    else:
        all = interleave((a, b, c, e, f, g, h, i))
    return all


@gluon.jit
def settled(seen, at, epoch, LOST, patience):
    """The data of words that were loaded as `seen` from `at`: mostly they were there; else it waits for them."""
    ASM: gl.constexpr = _settle()
    return gl.inline_asm_elementwise(
        ASM, "=r,l,l,r,l,r", [seen, at.to(gl.int64), epoch, LOST.to(gl.int64), patience], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.constexpr_function
def _settle():
    looks = """mov.b64 {d, t}, w; setp.eq.u32 there, t, $3;
    @!there ld.relaxed.gpu.global.b64 w, [$2];"""
    loop = _waiting(looks, "mov.b32 $0, d;", f"mov.b32 $0, {NAN};", 3)
    return f"{{ .reg .b64 w; .reg .b32 n, t, d; .reg .pred there, more; mov.b64 w, $1;\n{loop}}}"


@gluon.constexpr_function
def _counted():
    looks = "ld.acquire.gpu.global.b32 d, [$1]; setp.ge.s32 there, d, $2;"
    loop = _waiting(looks, "mov.b32 $0, 1;", "mov.b32 $0, 0;", 2)
    return f"{{ .reg .b32 n, t, d; .reg .pred there, more;\n{loop}}}"


@gluon.jit
def wait(COUNT, target, LOST, patience):
    """Waits until `target` have arrived at a counter; whether they did. Each thread looks for itself, so each may read then."""
    ASM: gl.constexpr = _counted()
    args = [COUNT.to(gl.int64), target, LOST.to(gl.int64), patience]
    return gl.inline_asm_elementwise(ASM, "=r,l,r,l,r", args, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def rows(at, epoch, LOST, patience, READS: gl.constexpr):
    """Data [A, 2 READS B] of words that lie from the addresses `at` [A, B] on, 2 READS each."""
    ASM: gl.constexpr = _look(_row_reads(READS))
    OPERANDS: gl.constexpr = _operands(READS)
    args = [at, at, epoch, LOST.to(gl.int64), patience]
    return interleave(gl.inline_asm_elementwise(ASM, OPERANDS, args, dtype=(gl.int32,) * (2 * READS), is_pure=False, pack=1))


@gluon.jit
def part_words(at, sums, epoch, LOST, patience, parts, PARTS: gl.constexpr, HEAD: gl.constexpr):
    """Of each part, in turn: sums of the two channels whose words begin at `at`; maximum and denominator, words at `sums`."""
    ASM: gl.constexpr = _look(_part_reads(PARTS, HEAD), _part_guards(PARTS))
    OPERANDS: gl.constexpr = _operands(2 * PARTS, True)
    args = [at, sums, epoch, LOST.to(gl.int64), patience, parts]
    return gl.inline_asm_elementwise(ASM, OPERANDS, args, dtype=(gl.int32,) * (4 * PARTS), is_pure=False, pack=1)


@gluon.jit
def _panels(WORDS, epoch, LOST, patience, begin: gl.constexpr, COUNT: gl.constexpr, LENGTH: gl.constexpr):
    """Four words' data [16, PANEL / 8] of each of COUNT panels from `begin` on; behind the last column it repeats words."""
    THREADS: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0])
    LAST: gl.constexpr = (begin + COUNT) * PANEL > LENGTH
    ASM: gl.constexpr = _look(_panel_reads(COUNT, LAST))
    OPERANDS: gl.constexpr = _operands(2 * COUNT)
    segment = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(1, THREADS)), 1)
    column = begin * PANEL + gl.expand_dims(gl.arange(0, PANEL // 8, gl.SliceLayout(0, THREADS)), 0) * 8
    # eight columns are four words, 32 bytes
    at = WORDS.to(gl.int64) + (segment * LENGTH + column) * 4
    last = WORDS.to(gl.int64) + (segment * LENGTH + gl.minimum(column + (COUNT - 1) * PANEL, LENGTH - 8)) * 4
    args = [at, last, epoch, LOST.to(gl.int64), patience]
    return gl.inline_asm_elementwise(ASM, OPERANDS, args, dtype=(gl.int32,) * (4 * COUNT), is_pure=False, pack=1)


@gluon.jit
def staged(
    WORDS, NORM_W, eps, ys, epoch, LOST, patience, K: gl.constexpr, NORM: gl.constexpr, APART: gl.constexpr,
):  # fmt: skip
    """Waits for x in words, and brings it into `ys` as X', behind the norm but for 1/rms; that, or 1."""
    LENGTH: gl.constexpr = K // 16
    COUNT: gl.constexpr = (LENGTH + PANEL - 1) // PANEL
    THREADS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    segment = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(1, THREADS)), 1)
    lane = gl.expand_dims(gl.arange(0, PANEL, gl.SliceLayout(0, THREADS)), 0)
    weights = ()
    if NORM:
        for p in gl.static_range(COUNT):
            k = p * PANEL + lane
            weights = weights + (gl.load(NORM_W + segment * LENGTH + k, mask=k < LENGTH, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    x = ()
    for begin in gl.static_range(0, COUNT, TOGETHER):
        d = _panels(WORDS, epoch, LOST, patience, begin, _at_most(COUNT - begin, TOGETHER), LENGTH)
        for p in gl.static_range(_at_most(COUNT - begin, TOGETHER)):
            panel = eight((d[4 * p], d[4 * p + 1], d[4 * p + 2], d[4 * p + 3]), ys.dtype, APART)
            panel = gl.convert_layout(panel, THREADS)
            if (begin + p + 1) * PANEL > LENGTH:
                panel = gl.where((begin + p) * PANEL + lane < LENGTH, panel, 0.0)
            x = x + (panel,)  # type: ignore[assignment]  # noqa: RUF005
    return stage(x, weights, eps, ys, K, NORM)
