import json

import pytest

from parity.program import ProgramError, build, load, parse, within_vocabulary
from parity.steps import FIELDS


def steps(*entries):
    return {"schema": 1, "steps": list(entries)}


PREFILL = {"op": "prefill", "ids": [[1, 2, 3]]}
TWO = {"op": "prefill", "ids": [[1, 2, 3], [4, 5, 6]]}
VERIFY = {"op": "verify", "ids": [[7, 8], [9, 10]]}


def accept(keep):
    return {"op": "accept", "keep": keep}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "no object with a list 'steps'"),
        ({"schema": 1}, "no object with a list 'steps'"),
        ({"schema": 2, "steps": [PREFILL]}, "This version reads schema 1"),
        ({"schema": True, "steps": [PREFILL]}, "schema is True. This version reads schema 1"),
        ({"schema": 1.0, "steps": [PREFILL]}, "schema is 1.0. This version reads schema 1"),
        (steps(), "steps is empty"),
        (steps({"op": "prefil", "ids": [[1]]}), r"steps\[0\] has op 'prefil'"),
        (steps({"op": ["prefill"], "ids": [[1]]}), r"steps\[0\] has op"),
        (steps("prefill"), r"steps\[0\] has op None"),
        (steps({"op": "prefill", "ids": [[]]}), "empty prompt"),
        (steps({"op": "prefill", "ids": []}), "no list of rows"),
        (steps({"op": "prefill"}), "no list of rows"),
        (steps({"op": "prefill", "ids": [[1], [1, 2]]}), "unequal length"),
        (steps({"op": "prefill", "ids": [[1.5]]}), "no whole number"),
        (steps({"op": "prefill", "ids": [[True]]}), "no whole number"),
        (steps({"op": "prefill", "ids": [[2**70]]}), "beyond 64 bits"),
        (steps({"op": "prefill", "ids": [[1]], "chunk": 0}), r"steps\[0\].chunk is 0"),
        (steps({"op": "prefill", "ids": [[1]], "chnk": 2}), "unknown fields"),
        (steps(PREFILL, {"op": "decode", "ids": [[1, 2]]}), r"steps\[1\] decodes 2 tokens"),
        (steps(PREFILL, {"op": "decode", "ids": [[1], [2]]}), "2 rows, the session 1 there"),
        ({"schema": 1, "steps": [PREFILL], "name": "x"}, "unknown fields"),
    ],
)
def test_a_malformed_program_is_refused_by_name(value, message):
    with pytest.raises(ProgramError, match=message):
        parse(value, "p.json")


def test_a_file_that_is_no_json_is_refused_by_name(tmp_path):
    path = tmp_path / "p.json"
    path.write_text("{")
    with pytest.raises(ProgramError, match=r"p\.json: is no JSON"):
        load(path)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('{"schema": 1, "steps": [], "steps": [{"op": "prefill", "ids": [[1]]}]}', "steps"),
        ('{"schema": 1, "steps": [{"op": "prefill", "ids": [[1]], "ids": [[2]]}]}', "ids"),
    ],
)
def test_a_key_that_comes_twice_is_refused_by_name(tmp_path, text, key):
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(ProgramError, match=rf"p\.json: has '{key}' twice in one object. Keep one"):
        load(path)


def test_an_absent_file_is_refused_by_name(tmp_path):
    with pytest.raises(ProgramError, match=r"none\.json: cannot be read"):
        load(tmp_path / "none.json")


def test_a_deeply_nested_file_is_refused(tmp_path):
    path = tmp_path / "p.json"
    path.write_text("[" * 100_000)
    with pytest.raises(ProgramError, match="is no JSON"):
        load(path)


@pytest.mark.parametrize("token", [-1, 131, 2**40])
def test_ids_outside_the_vocabulary_are_refused_with_their_place(token):
    program = parse(steps(PREFILL, {"op": "decode", "ids": [[token]]}), "p.json")
    with pytest.raises(ProgramError, match=rf"steps\[1\]\.ids\[0\]\[0\] is {token}, outside"):
        program.check_vocabulary(131)


def test_a_program_survives_its_json_form(tmp_path):
    program = build([[1, 2, 3, 4, 5], [5, 4, 3, 2, 1]], decode=2, chunk=2)
    path = tmp_path / "p.json"
    path.write_text(json.dumps(program.to_json()))
    assert load(path).digest() == program.digest()


def test_chunks_become_forwards_of_that_width():
    program = build([list(range(7))], decode=1, chunk=4)
    assert [ids.tolist() for _, _, ids in program.forwards()] == [[[0, 1, 2, 3]], [[4, 5]], [[6]]]


ALL = steps(
    TWO | {"lengths": [3, 0], "chunk": 2},
    VERIFY,
    accept([2, 0]),
    {"op": "snapshot", "name": "a"},
    {"op": "extend", "program": [TWO, {"op": "extract", "row": 1}, {"op": "decode", "ids": [[3]]}]},
    {"op": "filter", "rows": [2, 0]},
    VERIFY,
    accept(1),
    {"op": "extract", "row": 1},
    {"op": "decode", "ids": [[3]]},
    {"op": "restore", "name": "a"},
    {"op": "decode", "ids": [[3], [4]]},
)


def test_every_step_survives_its_json_form():
    program = parse(ALL)
    assert program.to_json() == ALL
    assert parse(json.loads(json.dumps(ALL))).digest() == program.digest()


def test_a_program_says_what_it_needs_also_in_the_steps_that_join():
    assert parse(ALL).needs() == {*FIELDS, "lengths"}
    inner = steps(PREFILL, {"op": "extend", "program": [PREFILL | {"lengths": [2]}]})
    assert parse(inner).needs() == {"prefill", "extend", "lengths"}
    assert not parse(inner).is_plain


def test_each_field_changes_the_digest():
    changed = [
        TWO | {"lengths": [3, 1], "chunk": 2},
        TWO | {"lengths": [3, 0], "chunk": 1},
        TWO | {"lengths": [3, 0]},
    ]
    digests = {parse(steps(entry, *ALL["steps"][1:])).digest() for entry in changed}
    assert len(digests | {parse(ALL).digest()}) == 4


def test_rows_end_in_different_chunks():
    moments = parse(steps(TWO | {"lengths": [3, 1], "chunk": 2}, VERIFY, accept(0))).moments()
    assert [m.tokens.tolist() for m in moments] == [[2, 1], [1, 0], [2, 2], []]
    assert [m.is_forward for m in moments] == [True, True, True, False]
    assert [m.at for m in moments] == [0, 0, 1, 2]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([TWO, accept(1)], r"steps\[1\] is 'accept' without a verify"),
        ([TWO, VERIFY], r"steps\[1\] is 'verify' without an accept"),
        ([TWO, VERIFY, TWO], r"steps\[2\] is 'prefill' in a round"),
        ([TWO, VERIFY, VERIFY], r"steps\[2\] is 'verify' in a round"),
        ([TWO, VERIFY, accept(1), accept(1)], r"steps\[3\] is 'accept' without a verify"),
        ([TWO, VERIFY, accept(3)], r"steps\[2\]\.keep is 3\. The round has 0 to 2"),
        ([TWO, VERIFY, accept(-1)], r"steps\[2\]\.keep is -1"),
        ([TWO, VERIFY, accept([1, 3])], r"steps\[2\]\.keep\[1\] is 3\. Give 0 to 2"),
        ([TWO, VERIFY, accept([1])], r"keep has 1 entries for 2 rows"),
        ([TWO, VERIFY, accept(True)], r"keep is True"),
        ([TWO, VERIFY, {"op": "accept"}], r"keep is None"),
        ([TWO | {"lengths": [4, 0]}], r"steps\[0\]\.lengths\[0\] is 4\. Give 0 to 3"),
        ([TWO | {"lengths": [1]}], r"lengths has 1 entries for 2 rows"),
        ([TWO | {"lengths": 2}], r"lengths is 2"),
        ([VERIFY | {"lengths": [1, 1]}], r"unknown fields \['lengths'\]"),
        ([{"op": "snapshot", "name": "a"}], r"steps\[0\] is 'snapshot'\. Begin with tokens"),
        ([TWO, {"op": "snapshot"}], r"steps\[1\]\.name is None"),
        (
            [TWO, {"op": "snapshot", "name": "b"}, {"op": "restore", "name": "a"}],
            r"steps\[2\]\.name is 'a', no snapshot before it\. Known: b",
        ),
        ([TWO, {"op": "filter", "rows": [0, 2]}], r"steps\[1\]\.rows has row 2 of 2"),
        ([TWO, {"op": "filter", "rows": [-1]}], r"rows has row -1 of 2"),
        ([TWO, {"op": "filter", "rows": [1, 1]}], r"rows is \[1, 1\], a row twice"),
        ([TWO, {"op": "filter", "rows": []}], r"rows is \[\]"),
        ([TWO, {"op": "extract", "row": 2}], r"steps\[1\]\.row has row 2 of 2"),
        ([TWO, {"op": "extract", "row": None}], r"row is None"),
        ([TWO, {"op": "filter", "rows": [1]}, VERIFY], r"has 2 rows, the session 1 there"),
        ([TWO, {"op": "extract", "row": 1}, VERIFY], r"has 2 rows, the session 1 there"),
        ([TWO, {"op": "extend", "program": [PREFILL]}, VERIFY], r"2 rows, the session 3 there"),
        ([TWO, {"op": "extend", "program": []}], r"steps\[1\]\.program is empty"),
        ([TWO, {"op": "extend"}], r"steps\[1\]\.program is no list of steps"),
        (
            [TWO, {"op": "extend", "program": [PREFILL, accept(1)]}],
            r"steps\[1\]\.program\[1\] is 'accept' without a verify",
        ),
        (
            [
                TWO,
                {"op": "snapshot", "name": "a"},
                {"op": "filter", "rows": [0]},
                {"op": "restore", "name": "a"},
                {"op": "decode", "ids": [[1]]},
            ],
            r"steps\[4\] has 1 rows, the session 2 there",
        ),
    ],
)
def test_steps_out_of_order_or_range_are_refused_by_name(entries, message):
    with pytest.raises(ProgramError, match=rf"^p\.json: .*{message}"):
        parse(steps(*entries), "p.json")


def test_padding_may_hold_any_id():
    ragged = PREFILL | {"ids": [[1, 999, -7]], "lengths": [1]}
    program = parse(steps(ragged))
    program.check_vocabulary(131)
    assert within_vocabulary(program.steps[0].ids, 131).tolist() == [[1, 130, 0]]
    inner = parse(steps(PREFILL, {"op": "extend", "program": [ragged | {"lengths": [2]}]}), "p")
    with pytest.raises(ProgramError, match=r"steps\[1\]\.program\[0\]\.ids\[0\]\[1\] is 999"):
        inner.check_vocabulary(131)


def test_the_forwards_of_a_stateful_program_are_not_all_of_it():
    with pytest.raises(ProgramError, match=r"^p: its forwards alone leave out accept, verify\."):
        parse(steps(VERIFY, accept(1)), "p").forwards()
