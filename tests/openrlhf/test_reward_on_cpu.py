import pytest

from gtpo_verl.openrlhf.reward import reward_func

PROMPT = "think between <reasoning> and </reasoning>, answer between <answer> and </answer>. 1+1?"
RIGHT = "<reasoning>one more</reasoning><answer>2</answer><|im_end|>"


def test_completions_have_the_papers_reward():
    completions = [RIGHT, RIGHT.replace("2", "3"), "2", ""]
    label = {"style": "rule", "ground_truth": "2"}
    found = reward_func([PROMPT + x for x in completions], [PROMPT] * 4, [label] * 4)
    assert found["rewards"].tolist() == [20, 10, 0, 0]
    assert found["scores"].tolist() == [1, 0, 0, 0]
    assert found["extra_logs"]["format"].tolist() == [10, 10, 0, 0]


@pytest.mark.parametrize("label", ["", None, {"style": "rule"}])
def test_a_label_without_an_answer_names_the_option(label):
    with pytest.raises(ValueError, match="give --data.label_key reward_model"):
        reward_func([PROMPT + RIGHT], [PROMPT], [label])


def test_prompt_that_was_cut_is_not_rewarded_as_a_completion():
    with pytest.raises(ValueError, match="raise --data.max_len"):
        reward_func([PROMPT[5:] + RIGHT], [PROMPT], [{"ground_truth": "2"}])
