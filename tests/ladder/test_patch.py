"""What was kept, written into a script's text."""

import os
import re
import shutil
import subprocess

import pytest

from trainstep.ladder.change import all_changes
from trainstep.ladder.changes.loaders import workers_here
from trainstep.ladder.patch import patch_of
from trainstep.ladder.trial.trial import encoded

BY_NAME = {each.name: each for each in all_changes("script")}
TEXT = '''"""A script."""
import torch
from torch import nn
from torch.utils.data import DataLoader


def main():
    model = nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=1e-3,  # größer
    )
    loader = DataLoader(range(10), batch_size=2, num_workers=0)
    for x in loader:
        loss = model(
            x
        ).sum()
        loss.backward()
'''
LOADER = {"line": 13, "num_workers": 0, "pin_memory": False, "is_iterable": False}
OPTIMIZER = {"class": "AdamW", "line": 9, "fused": False, "foreach": False, "names": ["model"]}
MODEL = {"line": 15, "device": "cuda", "floats": [True]}


@pytest.fixture
def patched(tmp_path):
    """The lines that a patch adds and takes away."""
    file = tmp_path / "train.py"

    def make(*kept, text=TEXT, loader=(), optimizer=(), model=(), debugging=(), places=()):
        file.write_text(text, encoding="utf-8")
        settings = {
            "loaders": [{**LOADER, **dict(loader), "file": str(file)}],
            "optimizers": [{**OPTIMIZER, **dict(optimizer), "file": str(file)}],
            "models": [{**MODEL, **dict(model), "file": str(file)}],
            "debugging": [{**each, "file": str(file)} for each in debugging],
            "places": {"fused attention": {f"{file}:{line}": how for line, how in dict(places).items()}},
        }
        found = patch_of(file, [BY_NAME[name] for name in kept], settings)
        changed = [line for line in found.diff(tmp_path).decode().splitlines()[2:] if line[:1] in "+-"]
        found.written, found.left = ([each.name for each in every] for every in (found.written, found.left))
        return found, [line for line in changed if line.strip("+-").strip()]

    return make


def test_arguments_go_behind_the_last_one(patched):
    found, lines = patched("fused optimizer")
    assert lines == ["-        lr=1e-3,  # größer", "+        lr=1e-3, fused=True,  # größer"]
    assert (found.written, found.left) == (["fused optimizer"], [])


def test_arguments_that_are_there_get_the_new_value(patched):
    _, lines = patched("pinned memory", text=TEXT.replace("num_workers=0", "pin_memory=False"))
    assert lines[1] == "+    loader = DataLoader(range(10), batch_size=2, pin_memory=True)"


def test_a_loader_with_few_workers_gets_more_and_one_that_would_repeat_itself_gets_none(patched):
    few = workers_here() - 1
    text = TEXT.replace("num_workers=0", f"num_workers={few}")
    _, lines = patched("loader workers", text=text, loader={"num_workers": few})
    assert lines[1].startswith(f"+    loader = DataLoader(range(10), batch_size=2, num_workers={few + 1}")
    found, lines = patched("loader workers", text=text, loader={"num_workers": few, "is_iterable": True})
    assert (lines, found.left) == ([], ["loader workers"])


def test_debugging_is_switched_off_where_it_was_switched_on(patched):
    on = "import torch\ntorch.autograd.set_detect_anomaly(True)\ntorch.use_deterministic_algorithms(mode=True)\n"
    places = [{"name": "anomaly-detection", "line": 2}, {"name": "deterministic-algorithms", "line": 3}]
    found, lines = patched("no debugging", text=on, debugging=places)
    off = ["+torch.autograd.set_detect_anomaly(False)", "+torch.use_deterministic_algorithms(mode=False)"]
    assert (sorted(lines[2:]), found.written) == (off, ["no debugging"])
    within = on.replace("set_detect_anomaly(True)", "detect_anomaly()")
    assert patched("no debugging", text=within, debugging=places)[0].left == ["no debugging"]


@pytest.mark.parametrize(
    ("own", "new"),
    [
        ("", ['    model.compile(mode="reduce-overhead")']),
        ("    model = torch.compile(model)\n", ["    model = torch.compile(model, mode='reduce-overhead')"]),
        ("    model.compile(mode='default')\n", ["    model.compile(mode='reduce-overhead')"]),
        ("    @torch.compile\n    def f(x): return x\n", []),
        ("    model, f = torch.compile(model), torch.compile(f)\n", []),
    ],
)
def test_cuda_graphs_go_into_the_call_that_compiles(patched, own, new):
    text, later = TEXT.replace("    optimizer =", f"{own}    optimizer ="), {"line": 9 + own.count("\n")}
    _, lines = patched("compiled model with CUDA graphs", text=text, optimizer=later)
    assert [each[1:] for each in lines if each.startswith("+")] == new


def test_changes_together_find_their_places(patched):
    found, lines = patched(*("TF32 matmuls", "fused optimizer", "bf16 autocast", "compiled model", "loader workers"))
    assert found.left == []
    added = [line[1:] for line in lines if line.startswith("+")]
    assert added[0] == 'torch.set_float32_matmul_precision("high")'
    assert added[1:3] == ["    model.compile()", "        lr=1e-3, fused=True,  # größer"]
    assert added[3].startswith("    loader = DataLoader(range(10), batch_size=2, num_workers=")
    assert added[4:] == [
        '        with torch.autocast("cuda", torch.bfloat16):',
        "            loss = model(",
        "                x",
        "            ).sum()",
    ]
    (text,) = found.texts.values()
    compile(text, "train.py", "exec")


@pytest.mark.parametrize(
    ("kept", "more"),
    [
        ("compiled blocks", {}),  # no line is known for it
        ("fused optimizer", {"optimizer": {"line": 3}}),  # no such call there
        ("compiled model", {"optimizer": {"names": []}}),  # the line does not know the model
        ("compiled model", {"optimizer": {"names": ["generator", "critic"]}}),
        ("bf16 autocast", {"text": TEXT.replace("x\n        ).sum()", '"""x\n""").sum()')}),  # a text over lines
        ("bf16 autocast", {"model": {"line": 14}}),  # a loop is no simple statement
        ("TF32 matmuls", {"text": TEXT.replace("import torch\n", "import torch as t\n")}),
    ],
)
def test_what_is_not_certain_is_left_out(patched, kept, more):
    found, lines = patched(kept, **more)
    assert (found.written, found.left, lines) == ([], [kept], [])


@pytest.mark.parametrize(
    ("statement", "floats", "widened"),
    [
        ("loss = model(x)", [True], ["loss"]),
        ("loss = model(x)", [False], []),  # token ids, say
        ("loss = model(x)", None, []),  # an object, which has no .float()
        ("loss, ids, more = model(x)", [True, False, True], ["loss", "more"]),
        ("loss = model(x)", [True, True], []),  # a tuple
        ("loss = model(x).sum()", [True], []),  # the sum is autocast's
        ("loss = other = model(x)", [True], []),
        ("model(x)", [True], []),
    ],
)
def test_what_autocast_narrows_is_float32_again(patched, statement, floats, widened):
    """As it is in the rung that was judged: bf16 logits would give a loss of three digits, and NumPy has no bf16."""
    text = TEXT.replace("loss = model(\n            x\n        ).sum()", statement)
    found, lines = patched("bf16 autocast", text=text, model={"line": 15, "floats": floats})
    assert found.written == ["bf16 autocast"]
    header = '+        with torch.autocast("cuda", torch.bfloat16):'
    assert [line for line in lines if line.startswith("+")] == [
        header, f"+            {statement}", *(f"+        {name} = {name}.float()" for name in widened),
    ]  # fmt: skip


ATTENTION = (
    TEXT
    + """

def attention(q, k, v, hidden, drop):
    scores = q @ k.transpose(-2, -1) / 8
    scores = scores.masked_fill(hidden, float("-inf"))
    return drop(torch.softmax(scores, dim=-1)) @ v
"""
)


@pytest.mark.parametrize(
    ("text", "how", "mask"),
    [
        (ATTENTION, "attn_mask", "attn_mask=~hidden"),
        (ATTENTION, "is_causal=True, dropout_p=0.1", "is_causal=True"),
        (ATTENTION.replace("(hidden, float", "(hidden == 0, float"), "several masks", "attn_mask=~(hidden == 0)"),
    ],
)
def test_attention_is_written_as_one_call_with_the_mask_that_was_seen(patched, text, how, mask):
    found, lines = patched("fused attention", "fused optimizer", text=text, places={len(text.splitlines()): how})
    assert (found.written, found.left) == (["fused attention", "fused optimizer"], [])
    added = [line.strip("+ ,") for line in lines if line.startswith("+")]
    assert added[1:5] == ["return torch.nn.functional.scaled_dot_product_attention(", "q", "k", "v"]
    assert [each for each in added[5:-1] if "mask" in each or "causal" in each] == [mask]
    assert added[-2:] == ["scale=1.0 / 8", ")"]


def test_attention_of_another_form_is_left_with_all_else_written(patched):
    text = ATTENTION.replace("/ 8", "/ 8 + k.mean()")
    found, _ = patched("fused attention", "fused optimizer", text=text, places={len(text.splitlines()): "attn_mask"})
    assert (found.written, found.left) == (["fused optimizer"], ["fused attention"])


def test_what_can_be_written_is(patched):
    found, lines = patched("compiled blocks", "fused optimizer")
    assert (found.written, found.left, len(lines)) == (["fused optimizer"], ["compiled blocks"], 2)


EVERY = ("TF32 matmuls", "fused optimizer", "bf16 autocast", "compiled model", "loader workers")
FEED = TEXT.replace("def main", "\f\ndef main").replace("import torch\n", "import torch\n\f")
FORMS = {
    "CRLF": (TEXT.replace("\n", "\r\n"), "utf-8"),
    "form feeds": (FEED.replace("    model = ", "\f    model = "), "utf-8"),
    "lone CR": (TEXT.replace("\n", "\r"), "utf-8"),
    "mixed": (TEXT.replace("torch\n", "torch\r\n").replace("        ).sum()\n", "        ).sum()\r\n"), "utf-8"),
    "no newline at the end": (TEXT.partition("\n        loss.backward")[0], "utf-8"),
    "byte order mark": (TEXT, "utf-8-sig"),
    "coding line": (f"# -*- coding: latin-1 -*-\n{TEXT}", "latin-1"),
    "separators": (TEXT.replace("größer", "größer \x1c\x85\u2028 sehr"), "utf-8"),
    "a form feed before the call": (TEXT.replace("        loss = model", "\f        loss = model"), "utf-8"),
}


@pytest.mark.parametrize("tool", ["git apply", "patch -p1"])
@pytest.mark.parametrize("form", FORMS)
def test_a_diff_applies_whatever_a_file_s_lines_and_bytes_are(form, tool, tmp_path):
    """And leaves all other bytes of it as they are."""
    if not shutil.which(tool.split()[0]):
        pytest.skip(f"no {tool} here")
    text, encoding = FORMS[form]
    file, diff = tmp_path / "my script.py", tmp_path / "out.diff"
    file.write_bytes(text.encode(encoding))
    lines = re.split("\r\n|\r|\n", text)
    words = ("AdamW", "range(", "= model(")
    first, loader, call = (next(at for at, line in enumerate(lines, 1) if word in line) for word in words)
    settings = {
        "loaders": [{**LOADER, "line": loader, "file": str(file)}],
        "optimizers": [{**OPTIMIZER, "line": first, "file": str(file)}],
        "models": [{**MODEL, "line": call, "file": str(file)}],
    }
    found = patch_of(file, [BY_NAME[name] for name in EVERY], settings)
    assert found.left == []
    diff.write_bytes(found.diff(tmp_path))
    command = [*tool.split(), *(["-i"] if tool.startswith("patch") else []), diff.name]
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, env=environment)
    assert ended.returncode == 0, ended.stderr
    patched = file.read_bytes()
    assert patched == found.texts[str(file)].encode(encoding)
    compile(patched, "train.py", "exec")
    assert b"compile()" in patched
    assert b"fused=True" in patched
    edited = re.compile(rb"^import|lr=|range|model|    x|sum")
    for line in filter(None, re.split(rb"\r\n|\r|\n", text.encode(encoding))):
        assert line in patched or edited.search(line.strip(b"\f"))
    ends, new = (set(re.findall(rb"\r\n|\r|\n", each)) for each in (text.encode(encoding), patched))
    assert new == ends


@pytest.mark.parametrize("line", ["", "# coding: latin-1\n", "#!python\n# -*- coding: cp1252 -*-\r\n"])
def test_a_patched_script_runs_in_the_encoding_that_it_declares(line):
    namespace = {}
    exec(compile(encoded(f"{line}text = 'größer'"), "train.py", "exec"), namespace)
    assert namespace["text"] == "größer"


def test_files_of_libraries_are_left_alone(tmp_path):
    library = tmp_path / "site-packages" / "trainer" / "loop.py"
    library.parent.mkdir(parents=True)
    library.write_text(TEXT, encoding="utf-8")
    settings = {"loaders": [], "models": [], "optimizers": [{**OPTIMIZER, "file": str(library)}]}
    assert patch_of(library, [BY_NAME["fused optimizer"]], settings).texts == {}
