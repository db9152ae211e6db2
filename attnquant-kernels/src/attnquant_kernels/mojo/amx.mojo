"""The matrix unit that some CPUs have (Intel's AMX): its instructions, and who may."""

from std.collections.string.string_span import get_static_string
from std.ffi import _Global, external_call
from std.sys import CompilationTarget
from std.sys._assembly import inlined_assembly

comptime SIDE = 16
"""Rows of a tile; in float32 also its columns."""

comptime WordsAt = Pointer[UInt32, MutUntrackedOrigin]
"""Memory as the unit sees it: a float32, or two bfloat16, in a word."""

comptime MAY_HAVE_UNIT = CompilationTarget.is_linux() and CompilationTarget.has_avx512f()
"""Whether to compile for the unit: what has it has AVX-512."""


def has_unit() -> Bool:
    """Return whether this process may use the unit; the first call asks Linux for it.

    MAX compiles for a processor, and keeps what it compiled: only when it runs is it
    known where.
    """
    comptime if MAY_HAVE_UNIT:
        try:
            return _ALLOWED.get_or_create_ptr()[]
        except:
            return False
    else:
        return False


comptime _ALLOWED = _Global["attnquant_matrix_unit_allowed", _ask_for_unit]
"""Asked once: an answer of CPUID takes microseconds in a virtual machine."""


def _ask_for_unit() -> Bool:
    # Leaf 7 of CPUID, register EDX: bit 22 stands for products of bfloat16.
    var features = inlined_assembly[
        "cpuid",
        UInt32,
        constraints="={edx},{eax},{ecx},~{ebx}",
        has_side_effect=True,
    ](UInt32(7), UInt32(0))
    if (features >> 22) & 1 == 0:
        return False
    comptime arch_prctl = 158
    comptime request_permission = 0x1023
    comptime tile_data = 18
    return external_call["syscall", Int](arch_prctl, request_permission, tile_data) == 0


@always_inline
def configure():
    """Lay the unit's eight tiles out, all alike, for this thread."""
    # Palette 1; bytes of a row of each tile, two bytes each; rows of each.
    var layout = Array[UInt8, 64](fill=0)
    layout[0] = 1
    comptime for tile in range(8):
        layout[16 + 2 * tile] = 4 * SIDE
        layout[48 + tile] = SIDE
    inlined_assembly[
        "ldtilecfg ($0)", NoneType, constraints="r,~{memory}", has_side_effect=True
    ](Pointer(to=layout))


@always_inline
def release():
    """Give the unit's state up, so that a switch of threads need not save it."""
    inlined_assembly[
        "tilerelease", NoneType, constraints="~{memory}", has_side_effect=True
    ]()


@always_inline
def load[tile: Int](start: WordsAt, row_bytes: Int):
    """Read a tile whose rows are some bytes apart."""
    comptime text = get_static_string["tileloadd ($0,$1,1), %tmm", String(tile)]()
    inlined_assembly[
        text, NoneType, constraints="r,r,~{memory}", has_side_effect=True
    ](start, row_bytes)


@always_inline
def store[tile: Int](start: WordsAt):
    """Write a tile, row by row."""
    comptime text = get_static_string["tilestored %tmm", String(tile), ", ($0,$1,1)"]()
    inlined_assembly[
        text, NoneType, constraints="r,r,~{memory}", has_side_effect=True
    ](start, 4 * SIDE)


@always_inline
def zero[tile: Int]():
    """Set a tile to zero."""
    comptime text = get_static_string["tilezero %tmm", String(tile)]()
    inlined_assembly[text, NoneType, constraints="", has_side_effect=True]()


@always_inline
def multiply[sums: Int, left: Int, right: Int]():
    """Add the product of two tiles of bfloat16 to a tile of float32.

    Parameters:
        sums: ``[16, 16]``.
        left: ``[16, 32]``.
        right: ``[32, 16]``, its rows in pairs: a word holds two of a column.
    """
    comptime text = get_static_string[
        "tdpbf16ps %tmm", String(right), ", %tmm", String(left), ", %tmm", String(sums)
    ]()
    inlined_assembly[text, NoneType, constraints="", has_side_effect=True]()
