"""What a run writes while it goes on stays small however long it goes on."""

from training_logs.recording.warnings import KEPT, Warnings, kind_of


def letters(number: int) -> str:
    return "".join(chr(ord("a") + int(digit)) for digit in str(number))


def test_warnings_that_differ_in_numbers_are_one_kind():
    assert kind_of("trainer 3: worker 12 left out in round 70: loss 1.5e-3") == kind_of(
        "trainer 0: worker 1 left out in round 7: loss 2"
    )
    warnings = Warnings()
    logged = [step for step in range(1, 50_001) if warnings.add(f"trainer 1: worker 0 failed in round {step}")]
    assert logged == [*range(1, 11), 100, 1000, 10_000]
    assert warnings.add("disk full")
    assert not warnings.add("disk full")
    assert warnings.summary() == [
        {
            "message": "trainer 1: worker 0 failed in round 1",
            "count": 50_000,
            "last": "trainer 1: worker 0 failed in round 50000",
        },
        {"message": "disk full", "count": 2},
    ]


def test_of_many_kinds_the_first_and_the_last_are_kept_and_all_are_counted():
    warnings = Warnings()
    for number in range(5000):
        warnings.add(f"kind {letters(number)}")
    for _ in range(2):
        warnings = Warnings(warnings.state_dict())  # a resume changes nothing
    warnings.add("kind " + letters(4900))
    found = warnings.summary()
    assert [entry["message"] for entry in found[:KEPT]] == [f"kind {letters(number)}" for number in range(KEPT)]
    last = [*range(4901, 5000), 4900]  # the one that came up again is the last
    assert [entry["message"] for entry in found[KEPT + 1 :]] == [f"kind {letters(number)}" for number in last]
    assert found[KEPT]["count"] == 5000 - 2 * KEPT
    assert found[-1]["count"] == 2
    assert sum(entry["count"] for entry in found) == 5001
