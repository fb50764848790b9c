"""Lines that keep something from step to step, in the syntax tree around the place where a step ends."""

import pytest

from trainstep.observe.keeping import keeping_lines

LOOP = """
def main(model, optimizer, loader, seen):
    outputs, total, at = [], 0, 0
    for x in loader:
        fresh = []
        fresh.append(x)
        {line}
        optimizer.step()  # a step
    seen.append(model)
"""


@pytest.mark.parametrize(
    ("line", "keeps"),
    [
        ("outputs.append(model(x))", True),
        ("outputs.append((at, model(x).item()))", False),
        ("total += model(x)", True),
        ("total += float(model(x))", False),
        ("at += 1", False),
        ("seen[at] = model(x)", True),
        ("optimizer.param_groups[0]['lr'] = x", False),
        ("self.kept.add(x)", True),
        ("fresh += [x]", False),
        ("model(x).backward(retain_graph=True)", True),
    ],
)
def test_lines_that_keep_more_than_numbers_are_named(line, keeps, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(LOOP.format(line=line))
    assert keeping_lines([(str(path), 8)]) == (["train.py:7"] if keeps else ["train.py:9"])


def test_what_a_step_calls_is_looked_at_where_nothing_around_it_keeps(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("class Net:\n    def forward(self, x):\n        self.seen.append(x)\n\n\nfor x in y:\n    step()\n")
    assert keeping_lines([(str(tmp_path / "gone.py"), 3), (str(path), 7)]) == ["train.py:3"]
