"""What the core does with a trace, again and slowly: one request at a time, from the rules alone.

Blocks of the trace are told apart by their ids alone, so there are no hashes, tables or reference counts. The
policies are those that rust/block/turn.rs describes.
"""

NUM_CLASSES = 4


class Sim:
    """A pool of `num_blocks` blocks of `block_size` tokens."""

    def __init__(self, num_blocks: int, block_size: int, policy: str) -> None:
        self.block_size = block_size
        self.counts_turns = policy == "turn"
        self.free = num_blocks
        # Idle blocks, in the order in which they went idle: name -> (clock at that time, class).
        self.idle: dict[tuple[int, ...], tuple[int, int]] = {}
        self.clock = self.evictions = self.hit_tokens = self.prompt_tokens = 0
        self.weights = [4096] * NUM_CLASSES
        self.late, self.gone = [0] * NUM_CLASSES, [0] * NUM_CLASSES
        self.last_age = 0
        self.period, self.prior = max(num_blocks // 4, 1024), num_blocks // 8 + 128

    @property
    def token_hit_ratio(self) -> float:
        return self.hit_tokens / self.prompt_tokens

    def request(self, input_len: int, ids: list[int]) -> None:
        """Looks a prompt up, computes what is missing, and releases it, tail first."""
        size = self.block_size
        full = [tuple(ids[: end + 1]) for end in range(input_len // size)]
        hit = 0
        while hit < len(full) and full[hit] in self.idle:
            hit += 1
        # The last token is always computed.
        self.hit_tokens += min(hit, (input_len - 1) // size) * size
        self.prompt_tokens += input_len
        classes = []
        for block in full[:hit]:
            since, turns = self.idle.pop(block)
            if 0 < self.last_age < 3 * (self.clock - since) * self.weights[turns]:
                self.late[turns] += 1
            classes.append(min(turns + 1, NUM_CLASSES - 1) if self.counts_turns else 0)
        classes += [0] * (len(full) - hit)
        # A block that is not full, or a copy of the last one, is free again in the end.
        extra = int(input_len % size > 0 or hit == len(full))
        for _ in range(len(full) - hit + extra):
            self._take()
        self.free += extra
        for block, turns in zip(reversed(full), reversed(classes), strict=True):
            self.idle[block] = (self.clock, turns)

    def _take(self) -> None:
        if self.free:
            self.free -= 1
        else:
            self._evict()
        self.clock += 1

    def _evict(self) -> None:
        def age(entry: tuple[tuple[int, ...], tuple[int, int]]) -> tuple[int, int]:
            since, turns = entry[1]
            return (self.clock - since) * self.weights[turns], -turns

        # Of several that are alike, the one that went idle first.
        block, (_, turns) = max(self.idle.items(), key=age)
        self.last_age = age((block, self.idle.pop(block)))[0]
        self.gone[turns] += 1
        self.evictions += 1
        if self.evictions % self.period == 0:
            self._learn()

    def _learn(self) -> None:
        late, gone = sum(self.late), sum(self.gone)
        assumed = self.prior * (late << 16) // (late + gone)
        gains = [
            ((self.late[c] << 16) + assumed) // (self.late[c] + self.gone[c] + self.prior) * self.weights[c]
            for c in range(NUM_CLASSES)
        ]
        for c in range(1, NUM_CLASSES):
            change = self.weights[c] * 3 * abs(gains[0] - gains[c]) // max(gains[0] + gains[c], 1) // 8
            moved = self.weights[c] + (change if gains[0] > gains[c] else -change)
            self.weights[c] = min(max(moved, 512), self.weights[c - 1])
        self.late = [count - count // 8 for count in self.late]
        self.gone = [count - count // 8 for count in self.gone]
