"""PTX instructions as C++ statements, one after another; `ptx_to_cpp` calls it.

It knows what the kernels use. An instruction, a modifier or an operand that it does not know is an error,
never passed over. Registers become unsigned integers of their size, whatever they hold.
"""

import re
from collections.abc import Callable

BITS = {
    **{f"{kind}{size}": size for kind in "bus" for size in (8, 16, 32, 64)},
    **{"f16": 16, "bf16": 16, "f32": 32, "f64": 64, "f16x2": 32, "bf16x2": 32, "e4m3x2": 16, "pred": 1},
}
SPECIAL = {
    f"%{name}.{axis}": f"machine::place.{member}.{axis}"
    for name, member in (
        ("tid", "thread"),
        ("ntid", "block_size"),
        ("ctaid", "block"),
        ("nctaid", "grid_size"),
    )
    for axis in "xyz"
} | {"%laneid": "machine::place.lane"}

# Floating-point instructions as C++ of their operands.
FLOAT = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "fma": "std::fma({0}, {1}, {2})",
    "min": "std::fmin({0}, {1})",
    "max": "std::fmax({0}, {1})",
    "neg": "-({0})",
    "abs": "std::fabs({0})",
    "rcp": "1 / {0}",
    "sqrt": "std::sqrt({0})",
    "rsqrt": "1 / std::sqrt({0})",
    "ex2": "std::exp2({0})",
    "lg2": "std::log2({0})",
}
COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
COMPARE_UNSIGNED = {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
ROUND = {"rmi": "std::floor", "rpi": "std::ceil", "rzi": "std::trunc", "rni": "std::nearbyint"}
# Modifiers that change nothing here: rounding to nearest is what C++ does.
HARMLESS = {"rn", "ftz", "approx", "full"}


class Unsupported(Exception):
    """PTX that this translator does not know."""


def unsigned(kind: str) -> str:
    return "bool" if kind == "pred" else f"uint{BITS[kind]}_t"


def typed(kind: str) -> str:
    """The C++ type in which an instruction of this type computes."""
    if kind in ("f32", "f64"):
        return {"f32": "float", "f64": "double"}[kind]
    return f"int{BITS[kind]}_t" if kind[0] == "s" else unsigned(kind)


def variable(register: str) -> str:
    return "r_" + re.sub(r"\W", "_", register.lstrip("%"))


def split_operands(text: str) -> list[str]:
    """At commas that are not within braces or brackets."""
    return [part.strip() for part in re.split(r",(?![^{\[]*[}\]])", text)] if text else []


def members(vector: str) -> list[str]:
    return [part.strip() for part in vector.strip("{} ").split(",")]


class Function:
    """One kernel on its way to C++."""

    def __init__(self, param: str, shared: set[str]) -> None:
        self.param = param  # the name of its struct of parameters
        self.shared = shared  # names of the shared memory, which begins at address 0

    # ---- operands

    def value(self, operand: str, kind: str = "b64") -> str:
        """An operand's bits, as an unsigned number of the type's size."""
        if operand in SPECIAL:
            return SPECIAL[operand]
        if operand == self.param:
            return "uint64_t(uintptr_t(params))"
        if operand in self.shared:
            return f"{unsigned(kind)}(0)"
        if match := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})|0[dD]([0-9a-fA-F]{16})", operand):
            return f"0x{match[1]}u" if match[1] else f"0x{match[2]}ull"
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", operand):
            return f"{unsigned(kind)}({int(operand.rstrip('U'), 0)}ll)"
        if re.fullmatch(r"%?[A-Za-z_$][\w$]*", operand):
            return variable(operand)
        raise Unsupported(f"operand {operand}")

    def number(self, operand: str, kind: str) -> str:
        """An operand as a C++ expression of the instruction's own type."""
        if kind in ("f32", "f64"):
            return f"machine::as_{typed(kind)}({self.value(operand, kind)})"
        return f"{typed(kind)}({self.value(operand, kind)})"

    def set(self, register: str, kind: str, expression: str) -> str:
        """Assigns a typed expression to a register."""
        if register == "_":
            return f"(void)({expression});"
        bits = f"machine::bits_of({typed(kind)}({expression}))" if kind in ("f32", "f64") else expression
        return f"{variable(register)} = {unsigned(kind)}({bits});"

    def address(self, operand: str) -> str:
        match = re.fullmatch(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\w+))?\s*\]", operand)
        if not match:
            raise Unsupported(f"address {operand}")
        return f"(uint64_t({self.value(match[1])}) + int64_t({int(match[2] or '0', 0)}))"

    # ---- instructions

    def instruction(self, text: str) -> str:
        match = re.fullmatch(r"(?:@(!?)(%?\w+)\s+)?([\w.:]+)\s*(.*)", text, re.S)
        if not match:
            raise Unsupported(text)
        negated, predicate, opcode, operands = match.groups()
        base, *modifiers = opcode.replace("::", "@").split(".")
        translate: Callable[..., str] | None = getattr(self, f"do_{base}", None)
        if translate is None and base in FLOAT and modifiers[-1] in ("f32", "f64"):
            translate = self.float_arithmetic
        if translate is None:
            raise Unsupported(text)
        try:
            code = translate(base, modifiers, split_operands(operands))
        except (Unsupported, KeyError, IndexError, ValueError) as error:
            raise Unsupported(f"{text} ({error})") from error
        return f"if ({negated}{variable(predicate)}) {{ {code} }}" if predicate else code

    def float_arithmetic(self, base: str, modifiers: list[str], a: list[str]) -> str:
        kind = modifiers[-1]
        if not set(modifiers[:-1]) <= HARMLESS:
            raise Unsupported("modifier")
        return self.set(a[0], kind, FLOAT[base].format(*(self.number(x, kind) for x in a[1:])))

    def do_bra(self, _base: str, _modifiers: list[str], a: list[str]) -> str:
        return f"goto {variable(a[0])};"

    def do_ret(self, *_: object) -> str:
        return "return;"

    def do_mov(self, _base: str, modifiers: list[str], a: list[str]) -> str:
        kind = modifiers[-1]
        if a[0].startswith("{"):
            parts = members(a[0])
            size = BITS[kind] // len(parts)
            sets = (
                f"{variable(x)} = uint{size}_t(whole >> {i * size});" for i, x in enumerate(parts) if x != "_"
            )
            return f"{{ {unsigned(kind)} whole = {self.value(a[1], kind)}; {' '.join(sets)} }}"
        if a[1].startswith("{"):
            parts = members(a[1])
            size = BITS[kind] // len(parts)
            whole = " | ".join(
                f"{unsigned(kind)}(uint{size}_t({self.value(x, f'b{size}')})) << {i * size}"
                for i, x in enumerate(parts)
            )
            return f"{variable(a[0])} = {whole};"
        return f"{variable(a[0])} = {unsigned(kind)}({self.value(a[1], kind)});"

    def do_cvta(self, _base: str, modifiers: list[str], a: list[str]) -> str:
        if "shared" not in modifiers:
            return f"{variable(a[0])} = {self.value(a[1])};"
        sign = "-" if "to" in modifiers else "+"
        return f"{variable(a[0])} = {self.value(a[1])} {sign} uint64_t(uintptr_t(machine::shared_base));"

    def place(self, modifiers: list[str], address: str, num_bytes: int, access: str) -> str:
        if "param" in modifiers:
            return f"reinterpret_cast<uint8_t*>({self.address(address)})"
        if "shared" in modifiers:
            return f"machine::shared({self.address(address)}, {num_bytes})"
        if "global" in modifiers:
            return f"machine::global_{access}({self.address(address)}, {num_bytes})"
        return f"machine::global({self.address(address)}, {num_bytes})"

    def do_ld(self, _base: str, modifiers: list[str], a: list[str]) -> str:
        kind, registers = modifiers[-1], members(a[0])
        num_bytes = BITS[kind] // 8
        place = self.place(modifiers, a[1], num_bytes * len(registers), "load")
        # A narrow load fills a wider register, with the sign if it is signed.
        sets = " ".join(f"{variable(x)} = words[{i}];" for i, x in enumerate(registers))
        words = f"{typed(kind) if kind[0] == 's' else unsigned(kind)} words[{len(registers)}]"
        return f"{{ {words}; memcpy(words, {place}, sizeof words); {sets} }}"

    def do_st(self, _base: str, modifiers: list[str], a: list[str]) -> str:
        kind, registers = modifiers[-1], members(a[1])
        place = self.place(modifiers, a[0], BITS[kind] // 8 * len(registers), "store")
        words = ", ".join(f"{unsigned(kind)}({self.value(x, kind)})" for x in registers)
        return f"{{ {unsigned(kind)} words[] = {{{words}}}; memcpy({place}, words, sizeof words); }}"

    def do_atom(self, _base: str, modifiers: list[str], a: list[str]) -> str:
        return self.atomic(modifiers, a[0], a[1], a[2])

    def do_red(self, _base: str, modifiers: list[str], a: list[str]) -> str:
        return self.atomic(modifiers, "_", a[0], a[1])

    def atomic(self, modifiers: list[str], register: str, address: str, operand: str) -> str:
        kind = modifiers[-1]
        change = {"add": "old + x", "max": "old > x ? old : x", "min": "old < x ? old : x", "or": "old | x"}
        (operation,) = set(modifiers) & set(change)
        place = self.place(modifiers, address, BITS[kind] // 8, "store")
        update = f"[&]({typed(kind)} old) {{ return {typed(kind)}({change[operation]}); }}"
        return (
            f"{{ {typed(kind)} x = {self.number(operand, kind)}; "
            f"{self.set(register, kind, f'machine::atomic<{typed(kind)}>({place}, {update})')} }}"
        )

    # ---- synchronisation, warps, tensor cores, copies

    def do_bar(self, _base: str, modifiers: list[str], a: list[str]) -> str:
        if modifiers == ["warp", "sync"]:
            return f"machine::warp_barrier({self.value(a[0], 'b32')});"
        if modifiers != ["sync"] or a != ["0"]:
            raise Unsupported("barrier")
        return "machine::barrier();"

    def do_fence(self, *_: object) -> str:
        return ";"  # Blocks and fibers run one at a time.

    def do_shfl(self, _base: str, modifiers: list[str], a: list[str]) -> str:
        register, _, predicate = a[0].partition("|")
        arguments = ", ".join(self.value(x, "b32") for x in a[1:])
        keep = f" {variable(predicate)} = valid;" if predicate else ""
        call = f"machine::shuffle('{modifiers[1][0]}', {arguments}, &valid)"
        return f"{{ bool valid; {variable(register)} = {call};{keep} }}"

    def do_vote(self, _base: str, modifiers: list[str], a: list[str]) -> str:
        predicate, mask = self.value(a[1]), self.value(a[2], "b32")
        return f"{variable(a[0])} = machine::vote(machine::Vote::{modifiers[1]}, {predicate}, {mask});"

    def do_mma(self, _base: str, modifiers: list[str], a: list[str]) -> str:
        element = modifiers[6]
        expected = f"sync.aligned.m16n8k16.row.col.f32.{element}.{element}.f32"
        if ".".join(modifiers) != expected or element not in ("f16", "bf16"):
            raise Unsupported("mma")
        left, right, addend = (", ".join(self.value(x, "b32") for x in members(part)) for part in a[1:])
        sets = " ".join(self.set(x, "f32", f"d[{i}]") for i, x in enumerate(members(a[0])))
        return (
            f"{{ uint32_t a[] = {{{left}}}, b[] = {{{right}}}, c[] = {{{addend}}}; float d[4]; "
            f"machine::mma(d, a, b, reinterpret_cast<float*>(c), {str(element == 'bf16').lower()}); {sets} }}"
        )

    def do_ldmatrix(self, _base: str, modifiers: list[str], a: list[str]) -> str:
        registers, transposed = members(a[0]), str("trans" in modifiers).lower()
        sets = " ".join(f"{variable(x)} = matrices[{i}];" for i, x in enumerate(registers))
        call = f"machine::ldmatrix(matrices, {len(registers)}, {transposed}, {self.address(a[1])});"
        return f"{{ uint32_t matrices[4]; {call} {sets} }}"

    def do_cp(self, _base: str, modifiers: list[str], a: list[str]) -> str:
        if "commit_group" in modifiers:
            return "machine::copy_async_commit();"
        if "wait_group" in modifiers:
            return f"machine::copy_async_wait({self.value(a[0], 'b32')});"
        size = self.value(a[2], "b32")
        places = f"{self.address(a[0])}, {self.address(a[1])}"
        if "bulk" in modifiers:
            return f"machine::copy_bulk({places}, {size}, {self.address(a[3])});"
        return f"machine::copy_async({places}, {size}, {self.value(a[3], 'b32') if len(a) > 3 else size});"

    def do_mbarrier(self, _base: str, modifiers: list[str], a: list[str]) -> str:
        if modifiers[0] == "init":
            return f"machine::mbarrier_init({self.address(a[0])}, {self.value(a[1], 'b32')});"
        if modifiers[0] == "arrive":
            expected = self.value(a[2], "b32") if "expect_tx" in modifiers else "0"
            return f"machine::mbarrier_arrive({self.address(a[1])}, {expected});"
        if modifiers[0] == "try_wait" and "parity" in modifiers:
            wait = f"machine::mbarrier_wait({self.address(a[1])}, {self.value(a[2], 'b32')});"
            return f"{wait} {variable(a[0])} = true;"
        raise Unsupported("mbarrier")

    # ---- comparisons, conversions

    def do_setp(self, _base: str, modifiers: list[str], a: list[str]) -> str:
        comparison, kind = modifiers[0], modifiers[-1]
        x, y = self.number(a[1], kind), self.number(a[2], kind)
        if comparison in COMPARE_UNSIGNED and kind[0] in "ub":
            result = f"{x} {COMPARE_UNSIGNED[comparison]} {y}"
        elif comparison in COMPARE:
            result = f"{x} {COMPARE[comparison]} {y}"
            if kind[0] == "f" and comparison == "ne":
                result = f"{x} < {y} || {x} > {y}"
        elif kind[0] == "f" and comparison in ("nan", "num"):
            result = f"{'!' if comparison == 'num' else ''}(std::isnan({x}) || std::isnan({y}))"
        elif kind[0] == "f" and comparison[-1] == "u":
            result = f"std::isnan({x}) || std::isnan({y}) || {x} {COMPARE[comparison[:-1]]} {y}"
        else:
            raise Unsupported("comparison")
        if len(a) > 3:
            result = f"({result}) {'&' if 'and' in modifiers else '|'} bool({self.value(a[3])})"
        return f"{variable(a[0])} = {result};"

    def do_selp(self, _base: str, modifiers: list[str], a: list[str]) -> str:
        kind = modifiers[-1]
        return (
            f"{variable(a[0])} = {variable(a[3])} ? {unsigned(kind)}({self.value(a[1], kind)})"
            f" : {unsigned(kind)}({self.value(a[2], kind)});"
        )

    def do_cvt(self, _base: str, modifiers: list[str], a: list[str]) -> str:
        to, source = [x for x in modifiers if x in BITS]
        rounding = next((x for x in modifiers if x in ROUND), None)
        if to in ("f16x2", "bf16x2") and source == "f32":
            narrow = "machine::to_half" if to == "f16x2" else "machine::to_bf16"
            high, low = (f"{narrow}({self.number(x, 'f32')})" for x in a[1:])
            return f"{variable(a[0])} = {low} | uint32_t({high}) << 16;"
        if to == "e4m3x2" and source == "f32" and "satfinite" in modifiers:
            high, low = (f"machine::to_e4m3({self.number(x, 'f32')})" for x in a[1:])
            return f"{variable(a[0])} = uint16_t({low} | {high} << 8);"
        if to == "f16x2" and source == "e4m3x2":
            low, high = (
                f"machine::to_half(machine::from_e4m3(uint8_t({self.value(a[1], 'b16')} >> {shift})))"
                for shift in (0, 8)
            )
            return f"{variable(a[0])} = {low} | uint32_t({high}) << 16;"
        if to == "f32" and source in ("f16", "bf16"):
            wide = "machine::from_half" if source == "f16" else "machine::from_bf16"
            return self.set(a[0], "f32", f"{wide}({self.value(a[1], 'b16')})")
        if source == "f32" and to in ("f16", "bf16"):
            narrow = "machine::to_half" if to == "f16" else "machine::to_bf16"
            return f"{variable(a[0])} = {narrow}({self.number(a[1], 'f32')});"
        number = self.number(a[1], source)
        if source[0] == "f" and to[0] in "us" and rounding is None:
            raise Unsupported("rounding")
        if rounding:
            number = f"{ROUND[rounding]}({number})"
        if to[0] == "f":
            return self.set(a[0], to, f"{typed(to)}({number})")
        return f"{variable(a[0])} = {unsigned(to)}({typed(to)}({number}));"

    # ---- integers

    def integer(self, modifiers: list[str], a: list[str], expression: str) -> str:
        """An instruction whose operands, {0} and so on, all have its own type."""
        kind = modifiers[-1]
        result = expression.format(*(self.number(x, kind) for x in a[1:]))
        return f"{variable(a[0])} = {unsigned(kind)}({result});"

    def do_add(self, base: str, modifiers: list[str], a: list[str]) -> str:
        kind = modifiers[-1]
        if kind in ("f32", "f64"):
            return self.float_arithmetic(base, modifiers, a)
        # Unsigned, since signed numbers must not overflow in C++.
        x, y = (f"{unsigned(kind)}({self.value(operand, kind)})" for operand in a[1:])
        sign = {"add": "+", "sub": "-"}[base]
        return f"{variable(a[0])} = {unsigned(kind)}({x} {sign} {y});"

    do_sub = do_add

    def do_mul(self, base: str, modifiers: list[str], a: list[str]) -> str:
        kind = modifiers[-1]
        if kind in ("f32", "f64"):
            return self.float_arithmetic(base, modifiers, a)
        if kind == "f16x2":
            halves = (
                f"machine::to_half(machine::from_half(uint16_t({self.value(a[1], 'b32')} >> {shift}))"
                f" * machine::from_half(uint16_t({self.value(a[2], 'b32')} >> {shift})))"
                for shift in (0, 16)
            )
            return f"{variable(a[0])} = {next(halves)} | uint32_t({next(halves)}) << 16;"
        size, wide = BITS[kind], "wide" in modifiers
        double = {32: "int64_t", 64: "__int128", 16: "int32_t"}[size]
        if kind[0] == "u":
            double = f"unsigned {double}" if double == "__int128" else f"u{double}"
        x, y = self.number(a[1], kind), self.number(a[2], kind)
        product = f"({double}({x}) * {double}({y}))"
        result = f"b{2 * size if wide else size}"
        if "hi" in modifiers:
            product = f"({product} >> {size})"
        elif not wide:
            product = f"({unsigned(kind)}({x}) * {unsigned(kind)}({y}))"
        total = f"{unsigned(result)}({product})"
        if base == "mad":
            total = f"{total} + {unsigned(result)}({self.value(a[3], result)})"
        return f"{variable(a[0])} = {unsigned(result)}({total});"

    do_mad = do_mul

    def do_div(self, base: str, modifiers: list[str], a: list[str]) -> str:
        if modifiers[-1] in ("f32", "f64"):
            return self.float_arithmetic(base, modifiers, a)
        return self.integer(modifiers, a, "{0} / {1}")

    def do_rem(self, _base: str, modifiers: list[str], a: list[str]) -> str:
        return self.integer(modifiers, a, "{0} % {1}")

    def do_min(self, base: str, modifiers: list[str], a: list[str]) -> str:
        if modifiers[-1] in ("f32", "f64"):
            return self.float_arithmetic(base, modifiers, a)
        return self.integer(modifiers, a, f"{{0}} {'<' if base == 'min' else '>'} {{1}} ? {{0}} : {{1}}")

    do_max = do_min

    def do_neg(self, base: str, modifiers: list[str], a: list[str]) -> str:
        if modifiers[-1] in ("f32", "f64"):
            return self.float_arithmetic(base, modifiers, a)
        return self.integer(modifiers, a, "0 - {0}")

    def do_abs(self, base: str, modifiers: list[str], a: list[str]) -> str:
        if modifiers[-1] in ("f32", "f64"):
            return self.float_arithmetic(base, modifiers, a)
        return self.integer(modifiers, a, "{0} < 0 ? 0 - {0} : {0}")

    def logic(self, base: str, modifiers: list[str], a: list[str]) -> str:
        sign = {"and": "&", "or": "|", "xor": "^"}[base]
        return self.integer(modifiers, a, f"{{0}} {sign} {{1}}")

    do_and = do_or = do_xor = logic

    def do_not(self, _base: str, modifiers: list[str], a: list[str]) -> str:
        return self.integer(modifiers, a, "!{0}" if modifiers[-1] == "pred" else "~{0}")

    def do_shl(self, _base: str, modifiers: list[str], a: list[str]) -> str:
        kind = modifiers[-1]
        amount, x = self.value(a[2], "b32"), self.value(a[1], kind)
        shifted = f"{unsigned(kind)}({x}) << {amount}"
        return f"{variable(a[0])} = {amount} >= {BITS[kind]} ? 0 : {unsigned(kind)}({shifted});"

    def do_shr(self, _base: str, modifiers: list[str], a: list[str]) -> str:
        kind = modifiers[-1]
        amount, x, last = self.value(a[2], "b32"), self.number(a[1], kind), BITS[kind] - 1
        if kind[0] == "s":
            return f"{variable(a[0])} = {unsigned(kind)}({x} >> ({amount} > {last} ? {last} : {amount}));"
        return f"{variable(a[0])} = {amount} > {last} ? 0 : {unsigned(kind)}({x} >> {amount});"

    def do_shf(self, _base: str, modifiers: list[str], a: list[str]) -> str:
        operands = ", ".join(self.value(x, "b32") for x in a[1:])
        flags = ", ".join(str(flag in modifiers).lower() for flag in ("l", "wrap"))
        return f"{variable(a[0])} = machine::funnel_shift({operands}, {flags});"

    def do_bfe(self, _base: str, modifiers: list[str], a: list[str]) -> str:
        kind = modifiers[-1]
        x = self.number(a[1], kind)
        where = f"{self.value(a[2], 'b32')}, {self.value(a[3], 'b32')}"
        extract = f"machine::bit_field_extract<{typed(kind)}>({x}, {where})"
        return f"{variable(a[0])} = {unsigned(kind)}({extract});"

    def do_bfi(self, _base: str, modifiers: list[str], a: list[str]) -> str:
        kind = modifiers[-1]
        field, base = self.number(a[1], kind), self.number(a[2], kind)
        where = f"{self.value(a[3], 'b32')}, {self.value(a[4], 'b32')}"
        return f"{variable(a[0])} = machine::bit_field_insert<{unsigned(kind)}>({field}, {base}, {where});"

    def do_prmt(self, _base: str, _modifiers: list[str], a: list[str]) -> str:
        return f"{variable(a[0])} = machine::prmt({', '.join(self.value(x, 'b32') for x in a[1:])});"

    def do_lop3(self, _base: str, _modifiers: list[str], a: list[str]) -> str:
        return f"{variable(a[0])} = machine::lop3({', '.join(self.value(x, 'b32') for x in a[1:])});"

    def do_popc(self, _base: str, modifiers: list[str], a: list[str]) -> str:
        return f"{variable(a[0])} = uint32_t(__builtin_popcountll({self.value(a[1], modifiers[-1])}));"

    def do_clz(self, _base: str, modifiers: list[str], a: list[str]) -> str:
        x, spare = self.value(a[1], modifiers[-1]), 64 - BITS[modifiers[-1]]
        count = f"__builtin_clzll(uint64_t({x})) - {spare}"
        return f"{variable(a[0])} = uint32_t({x} ? {count} : {BITS[modifiers[-1]]});"
