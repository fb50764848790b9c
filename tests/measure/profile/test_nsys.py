"""nsys SQLite exports, made here as nsys makes them: schema 3.24 and 3.25, with and without what may be absent."""

import sqlite3

import pytest

from trainstep.base.errors import UsageError
from trainstep.measure.profile import nsys
from trainstep.measure.profile.kernels import profiles_of
from trainstep.measure.profile.nsys import is_sqlite, read_nsys

PROCESS, OTHER = 4242, 4243
MAIN, AUTOGRAD = 4242, 4300


def global_id(process, thread=0, machine=1):
    """As nsys packs them: machine, process and thread in one integer."""
    return machine << 48 | process << 24 | thread


TABLES = {
    "StringIds": "id INTEGER PRIMARY KEY, value TEXT NOT NULL",
    "META_DATA_EXPORT": "name TEXT, value TEXT",
    "TARGET_INFO_GPU": "id INT, name TEXT",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start INT, end INT, eventClass INT, globalTid INT, correlationId INT, nameId INT, "
    "returnValue INT",
    "CUPTI_ACTIVITY_KIND_KERNEL": "start INT, end INT, deviceId INT, contextId INT, streamId INT, correlationId INT, "
    "globalPid INT, demangledName INT, shortName INT",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "start INT, end INT, deviceId INT, contextId INT, streamId INT, correlationId INT, "
    "globalPid INT, bytes INT, copyKind INT",
    "CUPTI_ACTIVITY_KIND_MEMSET": "start INT, end INT, deviceId INT, contextId INT, streamId INT, correlationId INT, "
    "globalPid INT, bytes INT",
    "NVTX_EVENTS": "start INT, end INT, eventType INT, rangeId INT, category INT, text TEXT, globalTid INT, "
    "domainId INT, textId INT",
}
STRINGS = {
    1: "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x64_8x5_nn_align1>(Params)",
    2: "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>(int)",
    3: "module:blocks.0.up",
}
# (thread, start, end, text, id of the text instead)
RANGES = [
    (MAIN, 1_000, 90_000, "step:0", None),
    (MAIN, 2_000, 30_000, "phase:forward", None),
    (MAIN, 3_000, 20_000, None, 3),
    (MAIN, 4_000, 9_000, "aten::mm, seq = 12, op_id = 5", None),
    (MAIN, 35_000, 80_000, "phase:backward", None),
    (AUTOGRAD, 40_000, 50_000, "autograd::engine::evaluate_function: MmBackward0, seq = 12", None),
    (AUTOGRAD, 41_000, 49_000, "MmBackward0, seq = 12", None),
    (AUTOGRAD, 42_000, 45_000, "aten::mm, op_id = 9", None),
]
CALLS = [(PROCESS, MAIN, 5_000, 77), (PROCESS, AUTOGRAD, 43_000, 78), (OTHER, OTHER, 5_500, 77)]
KERNELS = [(PROCESS, 100_000, 130_000, 77, 1), (PROCESS, 200_000, 260_000, 78, 1), (OTHER, 140_000, 141_000, 77, 2)]


def export(path, *, version="3.24.14", leave_out=(), without=(), kernels=KERNELS, columns=None):
    """Write an export; `leave_out` tables, `without` columns, replace `columns` of tables."""
    with sqlite3.connect(path) as database:
        definitions = {**TABLES, **(columns or {})}
        for table, definition in definitions.items():
            if table not in leave_out:
                kept = [part for part in definition.split(", ") if part.split()[0] not in without]
                database.execute(f"CREATE TABLE {table} ({', '.join(kept)})")

        def insert(table, **values):
            if table in leave_out:
                return
            known = {name: value for name, value in values.items() if name not in without}
            marks = ", ".join("?" * len(known))
            database.execute(f"INSERT INTO {table} ({', '.join(known)}) VALUES ({marks})", list(known.values()))

        for number, text in STRINGS.items():
            insert("StringIds", id=number, value=text)
        insert("META_DATA_EXPORT", name="EXPORT_SCHEMA_VERSION", value=version)
        insert("TARGET_INFO_GPU", id=0, name="NVIDIA H200")
        for process, thread, start, correlation in CALLS:
            insert("CUPTI_ACTIVITY_KIND_RUNTIME", start=start, end=start + 500, globalTid=global_id(process, thread),
                   correlationId=correlation)  # fmt: skip
        for process, start, end, correlation, name in kernels:
            insert("CUPTI_ACTIVITY_KIND_KERNEL", start=start, end=end, deviceId=0, streamId=7,
                   correlationId=correlation, globalPid=global_id(process), demangledName=name)  # fmt: skip
        insert("CUPTI_ACTIVITY_KIND_MEMCPY", start=131_000, end=132_000, deviceId=0, streamId=7, correlationId=77,
               globalPid=global_id(PROCESS), bytes=4096, copyKind=8)  # fmt: skip
        for thread, start, end, text, text_id in RANGES:
            insert("NVTX_EVENTS", start=start, end=end, eventType=59, text=text, textId=text_id,
                   globalTid=global_id(PROCESS, thread), domainId=0)  # fmt: skip
        insert("NVTX_EVENTS", start=4_500, end=None, eventType=59, text="never closed",
               globalTid=global_id(PROCESS, MAIN))  # fmt: skip
        insert("NVTX_EVENTS", start=0, end=300_000, eventType=60, text="module:anywhere",
               globalTid=global_id(PROCESS, MAIN))  # fmt: skip
    database.close()
    return path


@pytest.mark.parametrize("version", ["3.24.14", "3.25.2"])
def test_kernels_belong_to_the_ranges_of_the_thread_that_launched_them(tmp_path, version):
    trace = read_nsys(export(tmp_path / "profile.sqlite", version=version))
    assert trace.device == "NVIDIA H200"
    profile, other = profiles_of(trace).values()
    found = [(each.family, each.phase, each.module, each.operator, each.duration_us) for each in profile.kernels]
    assert found == [
        ("FP32 SIMT matmul", "forward", "blocks.0.up", "aten::mm", 30.0),
        ("copy", "forward", "blocks.0.up", "aten::mm", 1.0),
        ("FP32 SIMT matmul", "backward", "blocks.0.up", "aten::mm", 60.0),
    ]
    assert profile.steps == 1
    assert {each.step for each in profile.kernels} == {"0"}
    assert profile.outside_us == 0
    (kernel,) = other.kernels
    assert (kernel.phase, other.has_steps) == (None, False), "the other process takes no step, though the ids are alike"


def test_a_capture_range_begins_while_the_warm_up_s_kernels_run(tmp_path):
    queued = (PROCESS, 1_500, 41_500, 76, 1)
    profile, _ = profiles_of(read_nsys(export(tmp_path / "profile.sqlite", kernels=[queued, *KERNELS]))).values()
    assert [each.duration_us for each in profile.kernels] == [30.0, 1.0, 60.0]
    assert profile.outside_us == 40.0


def test_the_same_correlation_id_of_another_process_is_another_launch(tmp_path):
    trace = read_nsys(export(tmp_path / "profile.sqlite"))
    launches = {each.name.partition("<")[0]: each.launch for each in trace.work}
    (thread, _) = launches["void at::native::vectorized_elementwise_kernel"]
    assert thread[0] & (2**24 - 1) == OTHER


def test_without_ranges_all_kernels_count_and_none_is_placed(tmp_path):
    profiles = profiles_of(read_nsys(export(tmp_path / "profile.sqlite", leave_out=["NVTX_EVENTS"]))).values()
    assert [len(profile.kernels) for profile in profiles] == [3, 1]
    assert {each.phase for profile in profiles for each in profile.kernels} == {None}
    assert {(profile.steps, profile.has_steps) for profile in profiles} == {(1, False)}


def test_tables_and_columns_that_may_be_absent(tmp_path):
    absent = ("CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET", "TARGET_INFO_GPU", "META_DATA_EXPORT")
    profile, _ = profiles_of(read_nsys(export(tmp_path / "a.sqlite", leave_out=absent, without=("textId",)))).values()
    assert [each.phase for each in profile.kernels] == ["forward", "backward"]


def test_kernels_without_a_process_are_joined_if_there_is_only_one(tmp_path):
    with pytest.raises(UsageError, match="do not say of which process"):
        read_nsys(export(tmp_path / "two.sqlite", without=("globalPid",)))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"leave_out": ["CUPTI_ACTIVITY_KIND_KERNEL"]}, "holds no GPU kernels"),
        ({"kernels": []}, "holds no GPU kernels"),
        ({"leave_out": ["StringIds"]}, "not an export of Nsight Systems"),
        ({"without": ("correlationId",)}, "no column correlationId .schema 3.24.14"),
    ],
)
def test_exports_that_cannot_be_used(tmp_path, options, says):
    with pytest.raises(UsageError, match=says):
        read_nsys(export(tmp_path / "profile.sqlite", **options))


def test_foreign_damaged_and_missing_files(tmp_path):
    foreign = tmp_path / "foreign.sqlite"
    with sqlite3.connect(foreign) as database:
        database.execute("CREATE TABLE songs (title TEXT)")
    database.close()
    with pytest.raises(UsageError, match="not an export of Nsight Systems"):
        read_nsys(foreign)

    whole = export(tmp_path / "whole.sqlite").read_bytes()
    for name, content in (("cut", whole[: len(whole) // 2]), ("scrambled", whole[:4096] + b"\xff" * 4096)):
        path = tmp_path / f"{name}.sqlite"
        path.write_bytes(content)
        with pytest.raises(UsageError, match=r"damaged or cut short|not an export|no GPU kernels|no column"):
            read_nsys(path)

    assert is_sqlite(foreign)
    text = tmp_path / "text.sqlite"
    text.write_text("SELECT 1")
    assert not is_sqlite(text)
    with pytest.raises(UsageError, match="No such file"):
        is_sqlite(tmp_path / "absent.sqlite")


def test_values_of_the_wrong_type_are_said_to_be(tmp_path):
    path = export(tmp_path / "profile.sqlite")
    with sqlite3.connect(path) as database:
        database.execute("UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET globalTid = 'seven'")
    database.close()
    with pytest.raises(UsageError, match="a value that nsys does not write"):
        read_nsys(path)


def test_large_exports_are_refused_with_their_size(tmp_path, monkeypatch):
    path = export(tmp_path / "profile.sqlite")
    monkeypatch.setattr(nsys, "LARGEST_ROWS", 5)
    with pytest.raises(UsageError, match=r"holds 17 events \(0\.0 GiB\); at most 5"):
        read_nsys(path)
    monkeypatch.setattr(nsys, "LARGEST_BYTES", 100)
    with pytest.raises(UsageError, match=r"is 0\.0 GiB; at most"):
        read_nsys(path)
