"""Each data file of a plan, damaged in each way; a damage of each kind is in `make test`."""

import pytest
from plan import test_rubbish_plans as few
from plan.test_rubbish_plans import DAMAGES, EARLIER_FILES, FILES, Job

job = few.job


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_data_file(job: Job, name: str, damage: str) -> None:
    few.test_a_damaged_data_file(job, name, damage)


@pytest.mark.parametrize("damage", [*DAMAGES, "missing"])
@pytest.mark.parametrize("name", EARLIER_FILES)
def test_a_damaged_file_of_an_earlier_day(job: Job, name: str, damage: str) -> None:
    few.test_a_damaged_file_of_an_earlier_day_costs_only_its_use(job, name, damage)
