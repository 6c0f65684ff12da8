from l0prune.running.task import Amount, amount_keys, amounts


def test_a_record_has_the_amounts_by_measure():
    record = {"epoch": 1, **Amount(7.5, 7, 10).entries("macs"), **Amount(2, 1.5, 0).entries("time")}
    assert list(record)[1:] == [*amount_keys("macs"), *amount_keys("time")]
    assert amounts(record) == {"macs": Amount(7.5, 7, 10), "time": Amount(2, 1.5, 0)}


def test_shares_are_of_the_dense_amount():
    assert Amount(7.5, 7, 10).share(7.5) == 0.75
    assert Amount(0, 0, 0).share(0) == 0
