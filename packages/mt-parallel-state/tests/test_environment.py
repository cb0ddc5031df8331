"""detect_env over the variables of each launcher."""

from __future__ import annotations

import pytest
from mt_parallel_state import DistributedEnv, detect_env

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "host1",
    "MASTER_PORT": "1234",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_JOB_NODELIST": "node[003-005,9]",
    "SLURM_JOB_ID": "4217",
}
PET = {
    "PET_NNODES": "4",
    "PET_NODE_RANK": "2",
    "PET_NPROC_PER_NODE": "1",
    "PET_MASTER_ADDR": "job-0",
    "PET_MASTER_PORT": "23456",
}


def test_no_variables_mean_one_process() -> None:
    assert detect_env({"HOME": "/root", "MASTER_ADDR": "left-over"}) == DistributedEnv()
    assert DistributedEnv().launcher == "none"


def test_torchrun_variables_are_read_and_win_over_slurm() -> None:
    expected = DistributedEnv(
        rank=3,
        world_size=8,
        local_rank=1,
        local_world_size=2,
        master_addr="host1",
        master_port=1234,
        launcher="torchrun",
    )
    assert detect_env(TORCHRUN) == expected
    assert detect_env(TORCHRUN | SLURM | PET) == expected


def test_slurm_variables_are_read() -> None:
    assert detect_env(SLURM) == DistributedEnv(
        rank=5,
        world_size=8,
        local_rank=1,
        local_world_size=4,
        master_addr="node003",
        master_port=29717,
        launcher="slurm",
    )


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("node[003-005,9]", "node003"),
        ("node7", "node7"),
        ("a-1,b-2", "a-1"),
        ("r[1-2]n[01-04,7],login", "r1n01"),
        ("gpu[12,14]-ib", "gpu12-ib"),
        ("host.example.org,node[1-2]", "host.example.org"),
    ],
)
def test_slurm_first_host(nodelist: str, first: str) -> None:
    assert detect_env(SLURM | {"SLURM_JOB_NODELIST": nodelist}).master_addr == first


@pytest.mark.parametrize("nodelist", ["node[1-", "node[a-b]", "[", ",node1", "node 1"])
def test_slurm_malformed_node_lists_are_named(nodelist: str) -> None:
    with pytest.raises(ValueError, match=r"SLURM_JOB_NODELIST=.* is not a node list"):
        detect_env(SLURM | {"SLURM_JOB_NODELIST": nodelist})


def test_slurm_explicit_master_wins() -> None:
    env = detect_env(SLURM | {"MASTER_ADDR": "other", "MASTER_PORT": "77"})
    assert (env.master_addr, env.master_port) == ("other", 77)


def test_slurm_uneven_nodes_use_the_task_list() -> None:
    uneven = {k: v for k, v in SLURM.items() if k != "SLURM_NTASKS_PER_NODE"}
    uneven |= {"SLURM_TASKS_PER_NODE": "3(x2),2", "SLURM_NODEID": "2", "SLURM_PROCID": "7"}
    assert detect_env(uneven).local_world_size == 2
    with pytest.raises(ValueError, match=r"SLURM_NODEID=3 contradicts"):
        detect_env(uneven | {"SLURM_NODEID": "3"})
    with pytest.raises(ValueError, match="SLURM_TASKS_PER_NODE='3x2' is not a list"):
        detect_env(uneven | {"SLURM_TASKS_PER_NODE": "3x2"})


def test_a_slurm_step_may_be_smaller_than_its_job() -> None:
    env = detect_env(SLURM | {"SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_NODELIST": "node004"})
    assert (env.world_size, env.master_addr) == (6, "node004")


def test_pet_variables_are_read() -> None:
    assert detect_env(PET) == DistributedEnv(
        rank=2, world_size=4, master_addr="job-0", master_port=23456, launcher="pet"
    )
    assert detect_env({"PET_NNODES": "1"}).world_size == 1


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (TORCHRUN, {"WORLD_SIZE": None}, "WORLD_SIZE is not set"),
        (TORCHRUN, {"RANK": None}, "RANK is not set"),
        (TORCHRUN, {"LOCAL_RANK": ""}, "LOCAL_RANK is not set"),
        (TORCHRUN, {"MASTER_ADDR": None}, "MASTER_ADDR is not set"),
        (TORCHRUN, {"MASTER_PORT": "99999"}, "MASTER_PORT=99999 must be from 1 to 65535"),
        (TORCHRUN, {"RANK": "8"}, "RANK=8 contradicts WORLD_SIZE=8: it must be 0 to 7"),
        (TORCHRUN, {"LOCAL_RANK": "2"}, "LOCAL_RANK=2 contradicts LOCAL_WORLD_SIZE=2"),
        (TORCHRUN, {"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9 exceeds WORLD_SIZE=8"),
        (TORCHRUN, {"RANK": "three"}, "RANK='three' is not an integer"),
        (TORCHRUN, {"RANK": "-1"}, "RANK=-1 must be at least 0"),
        (SLURM, {"SLURM_NTASKS": None}, "SLURM_NTASKS is not set"),
        (SLURM, {"SLURM_LOCALID": None}, "SLURM_LOCALID is not set"),
        (SLURM, {"SLURM_NPROCS": "4"}, "SLURM_NTASKS='8' and SLURM_NPROCS='4'"),
        (SLURM, {"SLURM_PROCID": "8"}, "SLURM_PROCID=8 contradicts SLURM_NTASKS=8"),
        (SLURM, {"SLURM_LOCALID": "4"}, "SLURM_LOCALID=4 contradicts SLURM_NTASKS_PER_NODE=4"),
        (SLURM, {"SLURM_NTASKS_PER_NODE": None}, "SLURM_NTASKS_PER_NODE is not set"),
        (SLURM, {"SLURM_JOB_NODELIST": None}, "SLURM_JOB_NODELIST is not set"),
        (PET, {"PET_NODE_RANK": None}, "PET_NODE_RANK is not set"),
        (PET, {"PET_NODE_RANK": "4"}, "PET_NODE_RANK=4 contradicts PET_NNODES=4"),
        (PET, {"PET_NNODES": "1:4"}, "PET_NNODES='1:4' is an elastic range"),
        (PET, {"PET_NPROC_PER_NODE": "8"}, "PET_NPROC_PER_NODE='8' asks for several ranks"),
        (PET, {"PET_MASTER_ADDR": None}, "PET_MASTER_ADDR is not set"),
        (PET, {"MASTER_ADDR": "x"}, "PET_MASTER_ADDR='job-0' and MASTER_ADDR='x'"),
    ],
)
def test_bad_variables_are_named(base: dict, change: dict, message: str) -> None:
    env = {k: v for k, v in (base | change).items() if v is not None}
    with pytest.raises(ValueError, match=message):
        detect_env(env)


def test_an_env_checks_itself() -> None:
    with pytest.raises(ValueError, match="rank=2 must be from 0 to world_size - 1"):
        DistributedEnv(rank=2, world_size=2)


def test_an_agent_that_serves_the_store_is_known() -> None:
    assert not detect_env(TORCHRUN).store_is_served
    assert detect_env(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).store_is_served
    assert not detect_env(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"}).store_is_served
