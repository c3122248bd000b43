"""What `scripts/check_hook_points.py --compare` says about two releases."""

from scripts import check_hook_points


def release(version, problem=None, signature="(a)", source="1"):
    point = {"signature": signature, "source": source, "problem": problem}
    return {"version": version, "groups": {"pools": {"points": {"sglang.a.b": point}}}}


def test_differences():
    same = check_hook_points.differences(release("1"), release("2"))
    assert same == []
    assert check_hook_points.differences(release("1"), release("2", source="2")) == [
        "the same signature, another source:",
        "  sglang.a.b",
    ]


def test_a_hook_point_that_fails_in_both_releases_is_a_difference():
    problem = "sglang.a.b: takes no c"
    found = check_hook_points.differences(release("1", problem), release("2", problem))
    assert found == ["failing in both releases:", f"  {problem}"]
