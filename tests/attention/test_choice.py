"""`choose` answers from the measured table, and with PyTorch's pick where nothing was measured."""

from pathlib import Path

import pytest
import torch

from trainstep.attention import IMPLEMENTATIONS, choice, choice_table, choose
from trainstep.attention.measure_choice import measure, write_table
from trainstep.errors import UsageError


class _OnHopper:
    """What `choose` reads of a tensor, for a GPU that is not here."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.shape, self.dtype, self.device = torch.Size(shape), dtype, torch.device("cuda")


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {("sm_90", "bfloat16", 64, True): ((0, "sdpa-cudnn"), (2048, "flash-triton"))}
    monkeypatch.setattr(choice, "FASTEST", rows)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@pytest.mark.usefixtures("table")
def test_by_length() -> None:
    for length, expected in ((1, "sdpa-cudnn"), (2047, "sdpa-cudnn"), (2048, "flash-triton"), (10**6, "flash-triton")):
        q = _OnHopper(1, 2, length, 64)
        assert choose(q, q, q, True) == expected  # type: ignore[arg-type]


@pytest.mark.usefixtures("table")
def test_what_was_not_measured_is_left_to_pytorch() -> None:
    q = _OnHopper(1, 2, 4096, 64)
    grouped, shorter = _OnHopper(1, 1, 4096, 64), _OnHopper(1, 2, 100, 64)
    half, wide = _OnHopper(1, 2, 4096, 64, dtype=torch.float16), _OnHopper(1, 2, 4096, 128)
    assert choose(q, q, q, False) == "sdpa"  # type: ignore[arg-type]
    for others in ((q, grouped, grouped), (q, shorter, shorter), (half, half, half), (wide, wide, wide)):
        assert choose(*others, True) == "sdpa"  # type: ignore[arg-type]


def test_the_shipped_table_names_implementations_in_ascending_lengths() -> None:
    for rows in choice_table.FASTEST.values():
        assert rows[0][0] == 0
        assert [length for length, _ in rows] == sorted({length for length, _ in rows})
        assert all(impl in IMPLEMENTATIONS for _, impl in rows)


def test_what_is_written_can_be_imported(tmp_path: Path) -> None:
    table = {("sm_90", "float16", 64, True): ((0, "sdpa-flash"), (1024, "flash-triton"))}
    path = tmp_path / "table.py"
    path.write_text(Path(choice_table.__file__).read_text())
    write_table(table, path)
    names: dict[str, object] = {}
    exec(path.read_text(), names)
    assert names["FASTEST"] == table


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure on")
def test_measuring_needs_a_gpu() -> None:
    with pytest.raises(UsageError, match="GPU"):
        measure(write=None)


@pytest.mark.gpu
def test_auto_runs_what_it_says() -> None:
    from trainstep.attention import attention

    q = torch.randn(1, 2, 300, 256, device="cuda", dtype=torch.bfloat16)
    name = choose(q, q, q, True)
    assert torch.equal(attention(q, q, q, is_causal=True), attention(q, q, q, is_causal=True, impl=name))
