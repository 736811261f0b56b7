"""The message about an unknown name, literally."""

from tevatron.core.errors import unknown_name


def test_a_few_names_are_listed():
    assert unknown_name("model", "tst", ["two", "test"]) == (
        "unknown model 'tst'; there are: test, two. Did you mean 'test'?"
    )


def test_many_names_do_not_hide_the_one_that_is_meant():
    names = [f"name_{number}" for number in range(20)] + ["learning_rate"]
    assert unknown_name("flag", "learning_rte", names) == (
        "unknown flag 'learning_rte'. Did you mean 'learning_rate'?"
    )


def test_no_name_at_all_is_said():
    assert unknown_name("checkpoint", "best", []) == "unknown checkpoint 'best'; there is none."
