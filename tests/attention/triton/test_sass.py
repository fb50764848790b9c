"""Registers that are written too early are found, on whatever way a warp takes (`test_tiles` reads our kernels)."""

import pytest

from tests.attention.triton.sass import overwritten_in_flight, parse

PRODUCT = "HGMMA.64x64x16.F32.BF16 R88, R152, gdesc[UR36].tnspB, R88, gsb0"
OTHER = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR28], R24, gsb0"
WAIT_FOR_ALL, WAIT_FOR_ALL_BUT_ONE = "WARPGROUP.DEPBAR.LE gsb0, 0x0", "WARPGROUP.DEPBAR.LE gsb0, 0x1"


def listing(*lines: str) -> str:
    """As `cuobjdump -sass` prints them, the first at 0x0100."""
    return "\n".join(
        f"        /*{0x100 + 0x10 * place:04x}*/                   {line} ;      /* 0x40e0002498587df0 */\n"
        "                                                          /* 0x000fe20000000000 */"
        for place, line in enumerate(lines)
    )


@pytest.mark.parametrize(
    "writer",
    [
        "MOV R155, R3",
        "@P0 FADD R152, R1, R2",
        "LDS.128 R152, [R3]",
        "LDSM.16.M88.4 R149, [R3+0x10]",
        "LDSM.16.MT88.4 R149, [R3+0x10]",
        "LDSM.16.MT88.2 R151, [R3]",
        "IMAD.WIDE R154, R2, 0x4, R6",
        "CS2R R151, SRZ",
        "SHFL.BFLY PT, R153, R3, 0x1, 0x1f",
        "F2FP.BF16.F32.PACK_AB R154, R21, R20",
    ],
)
def test_a_register_that_is_written_before_the_wait_is_found(writer: str) -> None:
    (found,) = overwritten_in_flight(listing(PRODUCT, writer, WAIT_FOR_ALL, "EXIT"))
    assert found.startswith(PRODUCT)
    assert found.endswith(writer.removeprefix("@P0 "))
    assert not overwritten_in_flight(listing(PRODUCT, WAIT_FOR_ALL, writer, "EXIT"))


@pytest.mark.parametrize(
    "reader",
    [
        "MOV R156, R152",
        "LDS.64 R150, [R152]",
        "STS.128 [R3], R152",
        "ISETP.GT.AND P0, PT, R152, R3, PT",
        "CS2R R150, SRZ",
    ],
)
def test_what_reads_or_writes_beside_it_is_none(reader: str) -> None:
    assert not overwritten_in_flight(listing(PRODUCT, reader, WAIT_FOR_ALL, "EXIT"))


def test_a_wait_counts_the_groups_after_the_products() -> None:
    assert not overwritten_in_flight(listing(PRODUCT, OTHER, WAIT_FOR_ALL_BUT_ONE, "MOV R152, R1", "EXIT"))
    assert overwritten_in_flight(listing(PRODUCT, WAIT_FOR_ALL_BUT_ONE, "MOV R152, R1", WAIT_FOR_ALL, "EXIT"))
    uncommitted = PRODUCT.removesuffix(", gsb0")
    assert overwritten_in_flight(listing(uncommitted, WAIT_FOR_ALL, "MOV R152, R1", OTHER, WAIT_FOR_ALL, "EXIT"))


def test_loops_and_branches_are_followed() -> None:
    loop = ("MOV R152, R1", PRODUCT, "@P0 BRA 0x100", WAIT_FOR_ALL, "EXIT")
    assert overwritten_in_flight(listing(*loop)), "in the next round"
    assert not overwritten_in_flight(listing(WAIT_FOR_ALL, *loop)), "which begins with a wait"
    around = (PRODUCT, "@!P1 BRA 0x130", WAIT_FOR_ALL, "MOV R153, R1", WAIT_FOR_ALL, "EXIT")
    assert overwritten_in_flight(listing(*around)), "past the wait"
    assert not overwritten_in_flight(listing(PRODUCT, "BRA 0x130", "MOV R153, R1", WAIT_FOR_ALL, "EXIT"))


def test_what_is_no_listing_is_refused() -> None:
    with pytest.raises(ValueError, match="no instruction"):
        parse("nothing")
