"""What the assembler made of a kernel: does anything write registers that a product in flight may still be reading?

Hopper's products (HGMMA) run beside the instructions after them until `WARPGROUP.DEPBAR` has waited for their group,
and may read their left operand from registers all that time. Older assemblers lost sight of that (Triton's issues 9433
and 11781). Here every way that a warp may take from such a product is followed, branches and loops included.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

OPERAND = 4
"""Registers of a thread that one product of depth 16 (2-byte numbers) or 8 (TF32) reads its left operand from."""
_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/ +(?:(@!?U?P\w+) +)?([^;]*?) *;")
_PRODUCT = re.compile(r"HGMMA\S* R\d+, R(\d+), gdesc")
_WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([0-9a-f]+)")
_WRITTEN = re.compile(r"(\S+) (?:U?P\w+, )*R(\d+)\b")
_WRITES_NONE = ("HGMMA", "ST", "RED", "BRA", "BRX", "BAR", "SYNCS", "R2UR", "UTMA", "WARPSYNC", "R2P", "ISETP", "FSETP")


@dataclass(frozen=True)
class Instruction:
    """One of them, with where the next may be."""

    text: str
    address: int
    follows: tuple[int, ...]  # addresses

    @property
    def writes(self) -> range:
        """Numbers of the registers that it writes."""
        found = _WRITTEN.match(self.text)
        if found is None or found[1].startswith(_WRITES_NONE):
            return range(0)
        name, first = found[1], int(found[2])
        matrices = re.search(r"\.MT?88\.([24])$", name)  # of LDSM
        if matrices:
            width = int(matrices[1])
        elif "128" in name:
            width = 4
        else:
            width = 2 if ".64" in name or "WIDE" in name or name == "CS2R" else 1
        return range(first, first + width)


def reads_registers(ptx: str) -> bool:
    """Whether a kernel has products whose left operand is in registers; reading the listing of any other is no use."""
    return re.search(r"wgmma\.mma_async\S* \{[^}]*\}, \{", ptx) is not None


def parse(listing: str) -> dict[int, Instruction]:
    """`cuobjdump -sass` of one kernel: address → instruction.

    Raises:
        ValueError: it has none.
    """
    lines = [(int(address, 16), guard, text) for address, guard, text in _LINE.findall(listing)]
    if not lines:
        raise ValueError(f"no instruction is in this listing: {listing[:200]!r}")
    found = {}
    for place, (address, guard, text) in enumerate(lines):
        after = [lines[place + 1][0]] if place + 1 < len(lines) else []
        jump = re.match(r"BRA\S* (?:!?U?P\w+, )*(?:`\(\S+\)|0x([0-9a-f]+))", text)
        if jump and jump[1]:
            after = [int(jump[1], 16), *(after if guard or "P" in text.split("0x")[0][3:] else [])]
        elif text.startswith(("EXIT", "BRX", "RET")) and not guard:
            after = []  # by a table, as warps take their roles: before any product
        found[address] = Instruction(text, address, tuple(after))
    return found


def overwritten_in_flight(listing: str) -> list[str]:
    """Products from registers, each with an instruction that may write these before the product is waited for."""
    program = parse(listing)
    return [
        f"{product.text} … {each.text}"
        for product, read in products_from_registers(listing)
        for each in _writers(program, product, read)
    ]


def products_from_registers(listing: str) -> list[tuple[Instruction, set[int]]]:
    """The products whose left operand is in registers, with the numbers of these."""
    found = []
    for each in parse(listing).values():
        if operand := _PRODUCT.search(each.text):
            found.append((each, set(range(int(operand[1]), int(operand[1]) + OPERAND))))
    return found


def _writers(program: dict[int, Instruction], product: Instruction, read: set[int]) -> list[Instruction]:
    """Those of registers of `read`, on any way from the product to where it is waited for."""
    found, seen = [], set()
    ways = [
        (address, int("gsb0" in product.text)) for address in product.follows
    ]  # groups committed since, its own too
    while ways:
        address, committed = ways.pop()
        if (address, committed) in seen:
            continue
        seen.add((address, committed))
        each = program[address]
        wait = _WAIT.match(each.text)
        if wait and committed > int(wait[1], 16):
            continue
        committed = min(committed + ("HGMMA" in each.text and "gsb0" in each.text), 8)
        if read & set(each.writes):
            found.append(each)
            continue
        ways += [(follower, committed) for follower in each.follows]
    return found
