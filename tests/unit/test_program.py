import json

import pytest

from parity.program import ProgramError, build, load, parse


def steps(*entries):
    return {"schema": 1, "steps": list(entries)}


PREFILL = {"op": "prefill", "ids": [[1, 2, 3]]}


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
        (steps(PREFILL, {"op": "decode", "ids": [[1], [2]]}), "2 rows, the first step 1"),
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
