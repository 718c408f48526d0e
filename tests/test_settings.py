"""engines/settings.py prints settings that TRL and verl accept, and that mean the same."""
import json
import re
import shlex

import pytest
from small_models import NEEDS

import engines
import grpo
import gspo
import plumbing
from engines import here, names, settings
from examples import zoo


@pytest.fixture
def printed(tmp_path, capsys):
    """printed(script, **flags): prints the settings of a run with these flags. -> text; the words
    of each line that is not a comment"""
    def run(script, **flags):
        folder = tmp_path / "a b"
        folder.mkdir()
        record = {"script": f"{script.__name__.rpartition('.')[2]}.py",
                  "config": vars(script.Config(device="cpu", **flags))}
        plumbing.write(folder / "config.json", json.dumps(record))
        settings.main([str(folder)])
        text = capsys.readouterr().out
        return text, [shlex.split(line) for line in text.splitlines() if line and line[0] != "#"]
    return run


RUNS = [(grpo, {}), (grpo, {"loss_type": "dapo", "beta": 0.1, "kl_estimator": "k3_ratio"}),
        (grpo, {"loss_type": "dr_grpo", "scale_rewards": "none", "num_mini_batches": 3}),
        (grpo, {"delta": 2.0, "max_grad_norm": 0.0, "num_iterations": 2}),
        (grpo, {"loss_type": "cispo", "mask_truncated_completions": True, "entropy_coef": 0.1}),
        (grpo, {"num_generations": 4, "temperature": 0.7, "seed": 5, "max_completion_length": 20,
                "learning_rate": 1e-4, "scale_rewards": "batch", "num_iterations": 3}),
        (gspo, {"epsilon": 1e-3}), (zoo, {"loss_type": "gmpo", "gmpo_epsilon": 0.3}),
        (zoo, {"loss_type": "vespo"}), (zoo, {"loss_type": "clip_cov"}),
        (zoo, {"loss_type": "sapo"}), (here, {"loss": "gspo epsilon=0.1 how=sequence_sum"})]


@pytest.mark.parametrize("script, flags", RUNS)
def test_the_loss_of_the_run_is_read_back_with_its_average(script, flags, printed):
    _, (_, words, *_, verl) = printed(script, **flags)
    text = " ".join(words[3:words.index("--learning_rate")])
    _, how = engines.load(text)
    if script is not here:
        assert how == script.LOSS_TYPES[script.Config(**flags).loss_type][1]
    for name in flags.keys() & {"epsilon", "gmpo_epsilon", "delta"}:
        assert f"{name}={flags[name]}" in text.split()
    assert f"LOSS={text}" in verl


@pytest.mark.parametrize("script, flags", RUNS)
def test_trl_accepts_the_flags_and_counts_the_same_steps(script, flags, printed, tmp_path):
    _, (_, words, *own, _, _, _) = printed(script, **flags)
    words = words[words.index("--learning_rate"):]
    trl = pytest.importorskip("trl", reason=NEEDS)
    args, rest = trl.TrlParser(trl.GRPOConfig).parse_args_and_config(
        [*sum(own, words), "--use_cpu"], return_remaining_strings=True)
    assert rest[::2] == ["--model_name_or_path", "--dataset_name", "--reward_funcs"]
    assert args.output_dir == f"{tmp_path}/a b-trl"
    cfg = script.Config(device="cpu", **flags)
    rows = cfg.num_prompts // cfg.num_mini_batches * cfg.num_generations
    size = args.per_device_train_batch_size
    assert size * args.gradient_accumulation_steps == rows
    assert size * args.steps_per_generation == rows * cfg.num_mini_batches
    assert args.max_steps == cfg.max_steps * cfg.num_iterations * cfg.num_mini_batches
    assert args.use_bias_correction_kl == (cfg.kl_estimator == "k3_ratio")
    translated = {"max_steps", "save_steps", "max_grad_norm", "output_dir", "loss_type", "delta",
                  "epsilon", "epsilon_high", "eval_steps", "report_to", "resume_from_checkpoint"}
    for name in vars(args).keys() & vars(grpo.Config()).keys() - translated:
        assert getattr(args, name) == getattr(cfg, name), name
    assert args.max_grad_norm == (cfg.max_grad_norm or 1e9)
    if own:
        assert (args.epsilon_high or args.epsilon) == pytest.approx(
            cfg.epsilon_high + (cfg.loss_type == "cispo")) or cfg.loss_type in ("sapo", "vespo")
        assert args.importance_sampling_level == ("sequence" if script is gspo else "token")


def test_a_loss_or_a_setting_that_is_missing_elsewhere_is_not_translated():
    cispo = names.find(method="cispo")
    assert names.translate(cispo, {"epsilon_low": 1.0, "epsilon_high": 0.5}, "trl") == {
        "loss_type": "cispo", "epsilon_high": 1.5}
    assert names.translate(names.LOSSES["gspo_cispo"], {"epsilon_high": 0.25}, "trl") == {
        "loss_type": "cispo", "importance_sampling_level": "sequence", "epsilon_high": 1.25}
    for loss, values in ((cispo, {"epsilon_low": 0.5}), (names.LOSSES["dro"], {"beta": 1.0}),
                         (names.find(method="clip", how="sequence_sum"), {})):
        with pytest.raises(NotImplementedError):
            names.translate(loss, values, "trl")


ACTOR = "actor_rollout_ref.actor."
VALUES_IN_VERL = [
    ({"learning_rate": 3e-4}, {f"{ACTOR}optim.lr": "0.0003"}),
    ({"max_grad_norm": 0.0}, {f"{ACTOR}optim.clip_grad": "1000000000.0"}),
    ({"num_iterations": 3}, {f"{ACTOR}ppo_epochs": "3"}),
    ({"num_prompts": 64}, {"data.train_batch_size": "64", f"{ACTOR}ppo_mini_batch_size": "32"}),
    ({"micro_batch_size": 16}, {
        f"{ACTOR}ppo_micro_batch_size_per_gpu": "16",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": "16",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": "16"}),
    ({"entropy_coef": 0.25}, {f"{ACTOR}entropy_coeff": "0.25"}),
    ({"beta": 0.1}, {f"{ACTOR}use_kl_loss": "True", f"{ACTOR}kl_loss_coef": "0.1"}),
    ({"beta": 0.1, "kl_estimator": "k2"}, {
        f"{ACTOR}use_kl_loss": "True", f"{ACTOR}kl_loss_coef": "0.1",
        f"{ACTOR}kl_loss_type": "mse"}),
    ({"scale_rewards": "none"}, {"algorithm.norm_adv_by_std_in_grpo": "False"}),
    ({"num_generations": 4}, {"actor_rollout_ref.rollout.n": "4"}),
    ({"loss_type": "dr_grpo"}, {f"{ACTOR}loss_agg_mode": "seq-mean-token-sum-norm",
                                f"{ACTOR}loss_scale_factor": "48"}),
    ({"loss_type": "dapo"}, {f"{ACTOR}loss_agg_mode": "token-mean"})]


@pytest.mark.parametrize("flags, values", VALUES_IN_VERL, ids="-".join)
def test_each_flag_of_a_run_gives_its_values_in_verl_and_no_others(flags, values):
    def values_of(**flags):
        *_, line = settings.report("grpo", grpo, vars(grpo.Config(**flags)), "run")
        return dict(word.split("=", 1) for word in shlex.split(line)
                    if re.match(r"[a-z_.]+=", word) and "loss_mode" not in word)
    usual, changed = values_of(), values_of(**flags)
    assert {key: changed[key] for key in changed if changed[key] != usual[key]} == values


@pytest.mark.parametrize("script, flags, lost", [
    (grpo, {"dynamic_sampling": 2, "overlong_buffer": 8}, ["--dynamic_sampling 2",
                                                          "--overlong_buffer 8"]),
    (grpo, {"scale_rewards": "mean"}, ["--scale_rewards mean"]),
    (grpo, {"num_mini_batches": 3}, ["--num_mini_batches 3"]),
    (grpo, {"beta": 0.1, "kl_estimator": "k2"}, ["--kl_estimator k2"]),
    (zoo, {"advantage": "passk"}, ["--advantage passk"])])
def test_what_has_no_counterpart_is_listed(script, flags, lost, printed):
    text, _ = printed(script, **flags)
    first = text.splitlines()[0]
    assert first.startswith("#") and all(one in first for one in lost)
