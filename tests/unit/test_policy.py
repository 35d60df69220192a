import pytest

from parity import policy

GOOD = """
schema = 1
[[pair]]
candidate = ["impl"]
oracle = ["mlx-lm"]
dtypes = ["float32"]
feed = "free"
[[pair.rule]]
kinds = ["*"]
require = "identical"
reason = "same operations"
"""


def read(tmp_path, text):
    path = tmp_path / "policy.toml"
    path.write_text(text)
    return policy.load(path)


def test_the_shipped_policy_loads():
    assert policy.load().pair("impl", "mlx-lm", "bfloat16").rule("norm").require == "identical"


def test_a_pair_the_policy_does_not_name_is_none(tmp_path):
    assert read(tmp_path, GOOD).pair("impl", "transformers", "float32") is None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("schema = 1", "schema = 9", "schema is 9"),
        ('reason = "same operations"', "", "reason"),
        ('reason = "same operations"', 'reason = " "', "gives no reason"),
        ('"identical"', '"close"', "requires 'close'"),
        ('"identical"', '"arbitrated"', "requires 'arbitrated' with factor None"),
        ('require = "identical"', 'require = "identical"\nfactor = 2.0', "identical alone"),
        ('require = "identical"', 'require = "ulp"\nulp = -1', "ulp -1"),
        ('require = "identical"', 'require = "arbitrated"\nfactor = 0.5', "factor 0.5"),
        ('require = "identical"', 'require = "arbitrated"\nfactor = 2.0', "step_factor None"),
        ('kinds = ["*"]', 'kinds = ["norms"]', "no rule for taps of kind|unknown kinds norms"),
        ('kinds = ["*"]', 'kinds = ["norm"]', "no rule for taps of kind"),
        ('feed = "free"', 'feed = "none"', "feed is 'none'"),
        ('feed = "free"', "", "feed"),
        ('candidate = ["impl"]', "candidate = [", "cannot be read"),
        ('candidate = ["impl"]', 'candidate = "impl"', "candidate is 'impl', no list of names"),
        ('dtypes = ["float32"]', "dtypes = [32]", "dtypes is .*, no list of names"),
        ("require =", "atol = 1e-3\nrequire =", "atol"),
        ("schema = 1", "schema = true", "schema is True"),
        ("schema = 1", "schema = 1.0", "schema is 1.0"),
        ('require = "identical"', 'require = "ulp"\nulp = 17', "ulp 17; due is .* up to 16"),
        ('feed = "free"', 'feed = "free"\ndtype = "float32"', "unknown keys dtype"),
    ],
)
def test_a_malformed_policy_is_refused_by_name(tmp_path, old, new, message):
    assert old in GOOD
    with pytest.raises(policy.PolicyError, match=message) as caught:
        read(tmp_path, GOOD.replace(old, new, 1))
    assert "policy.toml" in str(caught.value)
