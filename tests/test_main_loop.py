"""What main of a script does with its parts: reference, gradients, critic, coefficients, pairs."""
import pytest
from conftest import SCRIPTS, scripts

pytestmark = pytest.mark.quick

PPO_WITH_TRPO = ("ppo", "--trust_region trpo")


@scripts("reinforce", "ppo", "grpo", "gspo")
def test_the_reference_stays_where_the_policy_began(train):
    kl = [metrics["kl"] for metrics in train("--num_iterations 1", num_steps=4).metrics]
    assert abs(kl[0]) < 1e-4
    assert kl[3] > 0.01


@pytest.mark.parametrize("script, flags", [*((name, "") for name in SCRIPTS), PPO_WITH_TRPO],
                         indirect=["script"])
def test_a_gradient_that_the_warm_start_left_behind_is_not_learned_from(train, flags):
    """Else a run that makes its base would differ from one that finds it made."""
    entropies = []
    for gradient in (0.0, 1.0):
        run = train(flags, num_steps=4, gradient=gradient)
        entropies.append([metrics["entropy"] for metrics in run.metrics])
    assert entropies[0] == entropies[1]
    assert len(set(entropies[0])) == 4
