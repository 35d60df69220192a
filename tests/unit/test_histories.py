"""What each row has seen after each moment."""

from parity.histories import histories
from parity.program import parse


def after(*steps):
    program = parse({"schema": 1, "steps": list(steps)})
    return [["".join(map(str, row)) for row in rows] for rows in histories(program)]


TWO = {"op": "prefill", "ids": [[1, 2, 3], [4, 5, 6]]}
VERIFY = {"op": "verify", "ids": [[7, 8], [9, 0]]}


def accept(keep):
    return {"op": "accept", "keep": keep}


def test_chunks_and_lengths():
    assert after(TWO | {"chunk": 2, "lengths": [1, 3]}) == [["1", "45"], ["1", "456"]]


def test_rows_that_never_had_a_token_are_empty():
    assert after(TWO | {"lengths": [0, 0]}, VERIFY, accept(0))[-1] == ["", ""]


def test_a_round_has_its_tokens_until_its_accept():
    assert after(VERIFY, accept([1, 0]), VERIFY, accept(2)) == [
        ["78", "90"],
        ["7", ""],
        ["778", "90"],
        ["778", "90"],
    ]


def test_rows_go_in_the_order_named():
    assert after(TWO, {"op": "filter", "rows": [1, 0]}, {"op": "extract", "row": 1})[1:] == [
        ["456", "123"],
        ["123"],
    ]


def test_rows_that_join_come_last_with_what_they_saw():
    inner = [TWO, VERIFY, accept(1), {"op": "filter", "rows": [1]}]
    assert after(VERIFY, accept(1), {"op": "extend", "program": inner})[-1] == ["7", "9", "4569"]


def test_a_snapshot_brings_back_rows_and_may_be_restored_again():
    found = after(
        TWO,
        {"op": "snapshot", "name": "a"},
        {"op": "extract", "row": 0},
        {"op": "restore", "name": "a"},
        {"op": "decode", "ids": [[8], [8]]},
        {"op": "restore", "name": "a"},
    )
    assert found[1:] == [["123", "456"], ["123"], ["123", "456"], ["1238", "4568"], ["123", "456"]]
