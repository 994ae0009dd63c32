"""Results, their table, and the file that they survive."""

import dataclasses
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from amp_lab.bench.comparison import BenchComparison
from amp_lab.bench.result_row import Row
from amp_lab.bench.results import Results
from amp_lab.bench.results_file import load_results
from amp_lab.core.errors import OptionError
from amp_lab.core.estimates import Ratio


def results_of(*rows, **environment):
    made = [
        Row(*key, "ok", trusted=True, unit="images", items=2, samples_s=[0.5, 0.5], rounds=3,
            disturbed=1, median_s=0.5, iqr_s=0.0, speedup=speedup,
            speedup_interval=[speedup - 0.1, speedup + 0.2], items_per_s=4.0, flops=100,
            flops_per_s=200.0, moved_bytes=50, least_bytes=10, floor_s=0.1,
            share_of_limit=0.2, error=0.0)
        for *key, speedup in rows
    ]  # fmt: skip
    about = {"device": "a toy", "torch": "2.15", "threads": 2, "date": "2026-01-01"} | environment
    return Results({"fp32": 1e12, "bf16": 4e12}, {64: 1e9}, True, about, made)


RECORDED = Path(__file__).parents[2] / "data" / "results"
EAGER = ("convmodel", "8x8", "fp32", "eager", 1.0)
EAGER_BF16 = ("convmodel", "8x8", "bf16", "eager", 2.0)
COMPILED_BF16 = ("convmodel", "8x8", "bf16", "compile", 3.5)


def test_results_survive_their_file(tmp_path):
    path = tmp_path / "r.json"
    results = results_of(EAGER, COMPILED_BF16)
    results.save(path)
    assert load_results(path) == results
    assert json.loads(path.read_text())["schema"] == "amp-lab bench 2"
    assert list(tmp_path.iterdir()) == [path]


def test_a_place_that_cannot_be_written_is_told(tmp_path):
    with pytest.raises(OptionError, match=r"r\.json: cannot be written"):
        results_of(EAGER).save(tmp_path / "none" / "r.json")


def edited(change):
    content = json.loads(results_of(EAGER).to_json())
    change(content)
    return json.dumps(content)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "damaged, not valid JSON"),
        (results_of(EAGER).to_json()[:-40], "damaged, not valid JSON"),
        ("[1, 2]", "no results"),
        ('{"schema": "other"}', "no results"),
        (edited(lambda c: c.update(schema="amp-lab bench 7")), "has the format 'amp-lab bench 7'"),
        (edited(lambda c: c.update(schema="amp-lab bench 1")), "but this amp_lab reads '.* 2'"),
        (edited(lambda c: c.pop("rows")), "damaged, 'rows' is missing"),
        (edited(lambda c: c.pop("trusted")), "damaged, .*'trusted'"),
        (edited(lambda c: c.update(more=1)), "damaged, a results has no field 'more'"),
        (edited(lambda c: c["environment"].pop("torch")), "damaged, 'torch' is missing"),
        (edited(lambda c: c.update(stream_bytes_per_s={})), "damaged, 'stream_bytes_per_s' is {}"),
        (edited(lambda c: c["rows"][0].update(median_s="fast")), "damaged, 'median_s' is 'fast'"),
        (edited(lambda c: c["rows"][0].update(samples_s=[None])), "'samples_s' is"),
        (edited(lambda c: c["rows"].append(3)), "damaged, a row is 3"),
        (edited(lambda c: c["rows"][0].update(status="fine")), "damaged, 'status' is 'fine'"),
        (edited(lambda c: c["rows"][0].update(median_s=None)), "is ok, .*no time"),
        (edited(lambda c: c["rows"][0].update(samples_s=[])), "is ok, .*no time"),
        (edited(lambda c: c["rows"][0].update(speedup_interval=[1.0])), "'speedup_interval' is"),
        (edited(lambda c: c["rows"][0].pop("rung")), "damaged, .*'rung'"),
        (edited(lambda c: c["rows"][0].update(speedup=-1)), "damaged, 'speedup' is -1"),
        (edited(lambda c: c["rows"][0].update(speedup=1e308)), "damaged, 'speedup' is 1e.308"),
        (edited(lambda c: c["rows"][0].update(median_s=-1)), "damaged, 'median_s' is -1"),
        (edited(lambda c: c["rows"][0].update(samples_s=[0.5, -1])), "'samples_s' is -1"),
        (edited(lambda c: c["flops_per_s"].update(fp32=0)), "'a rate per_s' is 0"),
    ],
)  # fmt: skip
def test_damaged_files_are_named(tmp_path, text, message):
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(OptionError, match=rf"r\.json: .*{message}"):
        load_results(path)


STRANGE = [None, True, -1, 0, 5, 1e308, -1e-9, 2**62, "", "²", "9" * 5000, [], [-1.0], {}, {"²": 1}]


def places(value):
    """The keys and indices that lead to each value within one."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, one in items:
        yield (key,)
        if isinstance(one, dict | list):
            yield from ((key, *place) for place in places(one))


def test_whatever_is_in_a_file_is_refused_in_a_line_or_can_be_shown(tmp_path):
    for place in places(json.loads(results_of(EAGER).to_json())):
        for value in STRANGE:
            (tmp_path / "r.json").write_text(edited(put(place, value)))
            assert_refused_or_shown(tmp_path / "r.json", (place, value))


def assert_refused_or_shown(path, where):
    try:
        found = load_results(path)
    except OptionError as error:
        refused = str(error)
    else:
        refused = ""
        found.distrust_impossible()
        shown = str((str(found), found.to_json(), found.ladder(), found.roofline()))
        assert "e+308" not in shown, where
    assert len(refused.splitlines()) <= 1, where
    assert len(refused) < 1_000, where


def put(place, value):
    def change(content):
        for key in place[:-1]:
            content = content[key]
        content[place[-1]] = value

    return change


@pytest.mark.parametrize("size", ["²", "٣", "9" * 5000, "-1", "0", "1.5", "", "1_0", " 1"])
def test_a_size_that_is_no_number_of_bytes_is_told_in_a_line(tmp_path, size):
    (tmp_path / "r.json").write_text(edited(lambda c: c.update(stream_bytes_per_s={size: 1e9})))
    with pytest.raises(OptionError, match="damaged, 'stream_bytes_per_s' is") as caught:
        load_results(tmp_path / "r.json")
    assert len(str(caught.value)) < 1_000


def test_results_on_the_disk_are_possible():
    recorded = [p for p in RECORDED.glob("*.json") if p.name.startswith("bench")]
    assert recorded
    for path in recorded:
        load_results(path)


def test_a_file_that_is_not_there_or_no_text(tmp_path):
    with pytest.raises(OptionError, match=r"none\.json: cannot be read"):
        load_results(tmp_path / "none.json")
    (tmp_path / "r.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(OptionError, match="damaged, not valid JSON"):
        load_results(tmp_path / "r.json")


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Row)])
def test_every_field_of_a_row_is_checked(tmp_path, name):
    path = tmp_path / "r.json"
    path.write_text(edited(lambda c: c["rows"][0].update({name: {"a": 1}})))
    with pytest.raises(OptionError, match=f"'{name}' is "):
        load_results(path)


def test_comparison_shows_what_all_have():
    other = results_of(
        (*COMPILED_BF16[:4], 5.0), EAGER, ("gpt", "2", "fp32", "eager", 1.0), device="b"
    )
    compared = BenchComparison([results_of(EAGER, COMPILED_BF16), other], ["mine", "theirs"])
    assert [rows[0].key[2:] for rows in compared.common()] == [
        ("fp32", "eager"),
        ("bf16", "compile"),
    ]
    best = compared.best_speedups()
    assert best["mine"]["convmodel 8x8"] == Ratio(3.5, (3.4, 3.7))
    assert best["theirs"]["convmodel 8x8"].median == 5.0
    assert "3.50x (3.40x to 3.70x)" in str(compared)
    assert "5.00x (4.90x to 5.20x)" in str(compared)
    assert "gpt" not in str(compared)
    row = json.loads(compared.to_json())["rows"][1]
    assert (row["speedup"], row["trusted"]) == ([3.5, 5.0], [True, True])
    assert row["speedup_interval"][0] == pytest.approx([3.4, 3.7])


def test_a_speedup_that_is_not_trusted_is_only_the_best_where_there_is_no_other():
    one = results_of(EAGER, EAGER_BF16, COMPILED_BF16)
    one.rows[2].distrust("the machine was busy")
    for rows, best in ((one.rows, 2.0), (one.rows[2:], 3.5)):
        left = replace(one, rows=rows)
        found = BenchComparison([left, left], ["a", "b"]).best_speedups()["a"]["convmodel 8x8"]
        assert (found.median, found.trusted) == (best, best == 2.0)


def test_the_table_has_intervals_and_marks_what_is_not_trusted():
    results = results_of(EAGER, EAGER_BF16, COMPILED_BF16)
    results.rows[1].distrust("the machine was busy in 9 of 12 rounds")
    table = str(results)
    assert "bf16 compile " in table
    assert "3.50x (3.40x to 3.70x)" in table
    assert "bf16 eager ?" in table
    assert str(results.rows[1].speedup_estimate) in table  # which has no figure but the interval
    assert "this machine in 1 of 3 rounds" in table
    busy = (
        "marked with ?): convmodel 8x8, bf16 eager. Reason: the machine was busy in 9 of 12 rounds."
    )
    assert busy in table


def test_the_table_shows_peak_memory_where_the_device_counts_it():
    results = results_of(EAGER)
    assert "memory" not in str(results).splitlines()[2]
    results.rows[0].peak_bytes = 3 * 2**20
    assert "3 MiB" in str(results)


def test_a_bar_that_is_not_trusted_is_told_to_the_figure():
    results = results_of(EAGER, EAGER_BF16)
    results.rows[1].distrust("the machine was busy")
    (_, _, fp32, limit, text), (_, _, bf16, _, _) = results.ladder()["convmodel 8x8"]
    assert (fp32.median, limit, text) == (500.0, 100.0, "1.00x")
    assert fp32.interval == pytest.approx((490, 510))
    assert (fp32.trusted, bf16.trusted) == (True, False)
    assert [point[1] for point in results.roofline()[2]] == ["fp32"]


@pytest.mark.parametrize(
    ("figures", "reason"),
    [
        ({"flops_per_s": 1.09e12}, ""),
        ({"flops_per_s": 1.2e12}, r"computes 1\.2 TFLOP/s, .* 1 TFLOP/s$"),
        ({"least_bytes": int(0.5 * 1.09e9)}, ""),
        ({"least_bytes": 10**9}, "moves .* 2 GB/s, .* 1 GB/s$"),
        ({"flops_per_s": None, "least_bytes": None}, ""),  # it has no limit
    ],
)
@pytest.mark.parametrize("at", [0, 1])
def test_what_the_device_cannot_do_is_not_trusted(figures, reason, at):
    rows = [EAGER, ("convmodel", "8x8", "fp32", "compile", 2.0), ("gpt", "2", "fp32", "eager", 1.0)]
    results = results_of(*rows)
    for name, value in figures.items():
        setattr(results.rows[at], name, value)
    results.distrust_impossible()
    trusted = [row.trusted for row in results.rows]
    if not reason:
        assert trusted == [True, True, True]
        return
    assert re.search(reason, results.rows[at].reason)
    if at == 0:  # a speed-up over a time that is wrong is wrong too
        assert results.rows[1].reason.startswith("the baseline, fp32 eager, ")
        assert results.rows[1].reason.endswith(results.rows[0].reason)
    assert trusted == [at > 0, False, True]


def test_comparison_of_what_has_nothing_in_common_is_refused():
    one, other = results_of(EAGER), results_of(("convmodel", "9x9", "fp32", "eager", 1.0))
    with pytest.raises(OptionError, match=r"mine, theirs cannot be compared"):
        BenchComparison([one, other], ["mine", "theirs"])


def test_a_row_that_failed_is_no_common_ground():
    failed = results_of(EAGER)
    failed.rows[0].status = "failed"
    with pytest.raises(OptionError, match="a, b cannot be compared"):
        BenchComparison([results_of(EAGER), failed], ["a", "b"])
