"""Tiles of queries that a program of the forward works on, one after another, and the keys that each walks."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from trainstep.attention.triton import tile_and_head


@gluon.jit
def item_of(turn, IS_CAUSAL: gl.constexpr):
    """Number, among all tiles of queries, of the tile that this program works on in its turn. Every other turn goes
    through the programs backwards: who had the longest of one has the shortest of the next."""
    programs = gl.num_programs(0)
    place = gl.program_id(0)
    if IS_CAUSAL:
        place = gl.where(turn % 2 == 0, place, programs - 1 - place)
    return turn * programs + place


@gluon.jit
def tile_of_item(item, work, IS_CAUSAL: gl.constexpr):
    """(tile, head) as `tile_and_head`; sections of heads go from short tiles to long and back in turn, the last one to
    the short, so that the programs' sums stay close and none ends with a long one."""
    tiles_per_head, all_heads, _heads, heads_per_section = work
    tile, batch_head = tile_and_head(item, tiles_per_head, all_heads, heads_per_section, LONGEST_LAST=False)
    if IS_CAUSAL:
        sections_left = (all_heads - 1) // heads_per_section - batch_head // heads_per_section
        tile = gl.where(sections_left % 2 == 0, tiles_per_head - 1 - tile, tile)
    return tile, batch_head


@gluon.jit
def steps_of(
    first_row, n_keys, window,
    IS_CAUSAL: gl.constexpr, OWN_ROWS: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_D: gl.constexpr,
):  # fmt: skip
    """The steps of a walk over the keys that the queries from first_row on see: how many, up to which they mask, and
    from which on again; and how many tiles of keys lie before the window of the first query."""
    visible = n_keys
    whole = n_keys // BLOCK_K  # tiles that every query sees in full
    if IS_CAUSAL:
        visible = gl.minimum(n_keys, first_row + OWN_ROWS)
        whole = gl.minimum(whole, (first_row + 1) // BLOCK_K)
    n_tiles = gl.cdiv(visible, BLOCK_K)
    n_masked = gl.maximum(n_tiles - whole, 1)  # the first step always masks
    skipped = gl.constexpr(0)
    tail = n_tiles
    if window is not None:
        skipped = gl.maximum(first_row - window + 1, 0) // BLOCK_K
        clear = gl.cdiv(gl.maximum(first_row + OWN_ROWS - window, 0), BLOCK_K)
        tail = gl.maximum(n_tiles - clear, n_masked)
        n_tiles -= skipped
        n_masked = gl.minimum(n_masked, n_tiles)
        tail = gl.minimum(tail, n_tiles)
        if BLOCK_D > 64:  # a walk without a mask between two with one would take registers that there are not
            tail = n_masked
    return n_tiles, n_masked, tail, skipped
