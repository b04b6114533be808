"""Memory arithmetic, with figures that can be checked by hand."""

import pytest

from pagedkv import plan
from pagedkv.plan import plan_pool

GIB = 2**30
# Layers, key/value heads, elements of a head.
LLAMA_3_1_8B = (32, 8, 128)
LLAMA_2_7B = (32, 32, 128)
BF16 = 2


def test_llama_3_1_8b_in_blocks_of_16():
    per_token = plan.kv_bytes_per_token(*LLAMA_3_1_8B, BF16)
    assert per_token == 128 * 2**10
    per_block = plan.block_bytes(per_token, 16)
    assert per_block == 2 * 2**20
    assert plan.blocks_in(50 * GIB, per_block) == 25_600
    # The null block takes one of them.
    assert plan.usable_blocks(50 * GIB, per_block) == 25_599


def test_a_request_of_1000_tokens_wastes_half_a_block():
    assert plan.blocks_for(1000, 16) == 63
    assert plan.wasted_slots(1000, 16) == 8


def test_contiguous_reservation_of_llama_2_7b():
    per_token = plan.kv_bytes_per_token(*LLAMA_2_7B, BF16)
    reserved = plan.contiguous_bytes(8, 2048, per_token)
    assert reserved == 8_589_934_592
    assert f"{reserved / 10**9:.2f} GB" == "8.59 GB"
    assert plan.format_bytes(reserved) == "8.00 GiB"


@pytest.mark.parametrize("block_size", [1, 4, 16, 256])
def test_blocks_cover_a_sequence_and_waste_less_than_one_block(block_size):
    for num_tokens in range(1, 600):
        blocks, wasted = plan.blocks_for(num_tokens, block_size), plan.wasted_slots(num_tokens, block_size)
        assert blocks * block_size - wasted == num_tokens
        assert 0 <= wasted < block_size


def test_no_tokens_take_no_blocks():
    assert plan.blocks_for(0, 16) == 0
    assert plan.wasted_slots(0, 16) == 0


def sized(**changes):
    arguments = {
        "bytes_per_token": 1024,
        "block_size": 16,
        "budget_bytes": 16 * 2**20,
        "num_blocks": None,
        "model_len": 2048,
    }
    return plan_pool(**(arguments | changes))


def test_the_budget_is_never_exceeded_and_the_null_block_is_in_it():
    for budget in range(48 * 1024, 400 * 1024, 1000):
        num_blocks = sized(budget_bytes=budget).num_blocks
        assert (num_blocks + 1) * 16 * 1024 <= budget < (num_blocks + 2) * 16 * 1024


def test_a_pool_that_holds_the_trained_length_caps_nothing():
    chosen = sized()
    assert (chosen.num_blocks, chosen.max_model_len, chosen.cap_reason) == (1023, 2048, None)


def test_the_longest_sequence_is_what_the_pool_holds():
    chosen = sized(num_blocks=100)
    assert (chosen.num_blocks, chosen.max_model_len) == (100, 1600)
    assert "100 blocks of 16 tokens" in chosen.cap_reason


def test_the_models_own_cap_is_told():
    chosen = sized(model_len=1024, model_reason="a sliding window of 1024 tokens")
    assert (chosen.max_model_len, chosen.cap_reason) == (1024, "a sliding window of 1024 tokens")


def test_a_shorter_length_of_the_users_own_is_no_cap():
    chosen = sized(max_model_len=512)
    assert (chosen.max_model_len, chosen.cap_reason) == (512, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"max_model_len": 2049},
            "max_model_len is 2049, allowed: 2..2048, the length that the model was trained for",
        ),
        (
            {"max_model_len": 500, "num_blocks": 20},
            "max_model_len is 500, allowed: 2..320, because the pool holds 20 blocks of 16 tokens",
        ),
        (
            {"max_model_len": 500, "model_len": 400, "model_reason": "of its window"},
            "max_model_len is 500, allowed: 2..400, because of its window",
        ),
        (
            {"budget_bytes": 47 * 1024},
            "kv_memory is 47.00 KiB, allowed: at least 48.00 KiB, "
            "which is two blocks of 16 tokens and the null block",
        ),
        (
            {"num_blocks": 2**27},
            "num_blocks is 134217728, allowed: 2..134217726; slots are numbered in 31 bits",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(changes, message):
    with pytest.raises(ValueError, match=r"is .*, allowed: ") as refusal:
        sized(**changes)
    assert str(refusal.value) == message


def test_a_huge_budget_stops_where_slots_end():
    assert sized(budget_bytes=2**50, bytes_per_token=2).num_blocks == (2**31 - 1) // 16 - 1


def check_memory(num_blocks=99, max_model_len=100, option="num_blocks", free_bytes=200_000):
    """Blocks of 1,600 bytes: sixteen tokens of 100; a position of the model takes 10."""
    plan.check_memory(
        plan.PoolPlan(num_blocks, max_model_len),
        bytes_per_token=100,
        table_bytes_per_token=10,
        block_size=16,
        free_bytes=free_bytes,
        option=option,
    )


def test_the_pool_and_the_positions_must_fit_the_free_memory():
    check_memory(free_bytes=100 * 1600 + 1000)
    with pytest.raises(ValueError, match=r"asks for 99 blocks, .* allowed: at most 98$"):
        check_memory(free_bytes=100 * 1600 + 999)
    with pytest.raises(
        ValueError, match=r"^num_blocks asks for 50000000 blocks, which take 74\.51 GiB and 1000 bytes for "
    ):
        check_memory(num_blocks=50_000_000)
    # 199,000 bytes are left beside the positions, which is 124 blocks with the null block.
    with pytest.raises(
        ValueError, match=r"^kv_memory asks for .* 195\.31 KiB are free; allowed: at most 193\.75 "
    ):
        check_memory(num_blocks=1000, option="kv_memory")
    check_memory(num_blocks=123)
    for option in ("", "num_blocks"):
        with pytest.raises(
            ValueError, match=r"^max_model_len is 30000, whose positions take 292\.97 KiB beside "
        ):
            check_memory(max_model_len=30_000, option=option)


def test_shares_of_the_free_memory():
    assert plan.cpu_budget(8 * GIB) == 2 * GIB
    assert plan.cpu_budget(64 * GIB) == 4 * GIB


def gpu_budget(**changes):
    figures = {"free_bytes": 120, "total_bytes": 140, "step_bytes": 3, "kept_bytes": 2}
    figures = {name: changes.pop(name, size) * GIB for name, size in figures.items()}
    return plan.gpu_budget(**figures, **{"utilization": 0.9} | changes)


def test_the_cache_on_a_gpu_is_what_the_share_leaves_beside_the_weights_and_the_largest_step():
    assert gpu_budget() == (126 - 20 - 5) * GIB
    assert gpu_budget(utilization=0.5) == (70 - 20 - 5) * GIB


def test_what_is_not_free_is_not_planned_with():
    assert gpu_budget(utilization=1.0) == (120 - 5) * GIB


def test_a_gpu_without_room_for_a_cache_is_refused():
    with pytest.raises(
        ValueError,
        match=r"^gpu_memory_utilization is 0\.1 of 140\.00 GiB, .* 20\.00 GiB are taken, a step needs 3",
    ):
        gpu_budget(utilization=0.1)


def test_bytes_for_people():
    assert plan.format_bytes(1000) == "1000 bytes"
    assert plan.format_bytes(3 * 2**29) == "1.50 GiB"


class Machine:
    """A /proc and a /sys/fs/cgroup with what a test puts there."""

    def __init__(self, root):
        self.proc, self.cgroups = root / "proc", root / "cgroup"
        self.write(self.proc / "meminfo", "MemTotal: 999 kB\nMemAvailable:   8388608 kB\n")

    @staticmethod
    def write(path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def group(self, folder, **files):
        for name, text in files.items():
            self.write(self.cgroups / folder / name.replace("__", "."), text)

    def free(self):
        return plan.free_memory(self.proc, self.cgroups)

    def cores(self):
        return plan.usable_cores(self.proc, self.cgroups)


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_free_memory_without_control_groups(machine):
    assert machine.free() == 8 * GIB


def test_free_memory_within_a_limit_counts_droppable_page_cache(machine):
    machine.write(machine.proc / "self" / "cgroup", "0::/box/inner\n")
    stat = f"anon 5\ninactive_file {GIB}\nactive_file 7\n"
    machine.group("box/inner", memory__max=f"{6 * GIB}", memory__current=f"{4 * GIB}", memory__stat=stat)
    assert machine.free() == 3 * GIB


def test_an_outer_group_limits_as_well(machine):
    machine.write(machine.proc / "self" / "cgroup", "0::/box/inner\n")
    machine.group("box/inner", memory__max="max\n", memory__current="5\n")
    machine.group("box", memory__max=f"{2 * GIB}\n", memory__current=f"{GIB}\n")
    assert machine.free() == GIB


def test_the_old_hierarchy_and_a_path_outside_of_the_mount(machine):
    machine.write(machine.proc / "self" / "cgroup", "4:memory:/not/mounted/here\n0::/\n")
    machine.group(
        "memory", **{"memory__limit_in_bytes": f"{4 * GIB}", "memory__usage_in_bytes": f"{3 * GIB}"}
    )
    assert machine.free() == GIB


def test_a_group_over_its_limit_leaves_nothing(machine):
    machine.write(machine.proc / "self" / "cgroup", "0::/\n")
    machine.group(".", memory__max="10", memory__current="20")
    assert machine.free() == 0


def test_cores_are_bound_by_affinity_and_quota(machine, monkeypatch):
    monkeypatch.setattr(plan.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert machine.cores() == 8
    machine.write(machine.proc / "self" / "cgroup", "1:cpu,cpuacct:/old\n0::/new\n")
    machine.group("new", cpu__max="max 100000\n")
    assert machine.cores() == 8
    machine.group("new", cpu__max="250000 100000\n")
    assert machine.cores() == 2
    machine.group("cpu/old", cpu__cfs_quota_us="-1\n", cpu__cfs_period_us="100000\n")
    assert machine.cores() == 2
    machine.group("cpu/old", cpu__cfs_quota_us="50000\n")
    assert machine.cores() == 1


@pytest.mark.parametrize(
    ("space_bytes", "free_bytes", "computes_on_gpu", "num_blocks"),
    [
        (None, 64 * GIB, False, 0),
        (None, 64 * GIB, True, 2048),
        (None, 8 * GIB, True, 1024),
        (0, 64 * GIB, True, 0),
        (GIB, 64 * GIB, False, 512),
        (GIB + 1, GIB + 1, True, 512),
    ],
)
def test_host_blocks_of_llama_3_1_8b(space_bytes, free_bytes, computes_on_gpu, num_blocks):
    given = plan.host_blocks(
        space_bytes, bytes_per_block=2 * 2**20, free_bytes=free_bytes, computes_on_gpu=computes_on_gpu
    )
    assert given == num_blocks


def test_this_machine_has_memory_and_cores():
    assert plan.free_memory() > 0
    assert plan.usable_cores() >= 1
