"""The soak, for twenty seconds."""

import soak


def test_soak():
    summary = soak.soak(20, 1)
    assert summary["operations"] > 500
    assert summary["faults_survived"] > 3
    assert summary["ranks"]["went on"] > 0
