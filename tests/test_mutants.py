"""Each mistake of tests/equivalent.txt is still made, and what scripts share changes in all."""
import mutants
import mutations
import pytest

pytestmark = pytest.mark.quick


def test_what_scripts_share_is_changed_in_all_of_them_and_no_equivalent_mistake_is_gone():
    made = {str(one): one for folder in mutations.FOLDERS for one in mutations.of_folder(folder)}
    shared = [one for one in made.values() if one.function == "aggregate"]
    assert {tuple(mutations.apply(one)) for one in shared} == {
        ("grpo.py", "gspo.py", "ppo.py", "reinforce.py")}
    assert [name for name in mutants.equivalent() if name not in made] == []
