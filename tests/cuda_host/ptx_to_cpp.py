"""Translates the compiler's PTX, which a GPU's assembler would get, into C++ that `machine.h` executes.

`host_device` calls it. Lines of the kernels' sources are kept, so that debuggers and sanitizers name them.
"""

import re
from collections.abc import Iterator

from ptx_instructions import Function, Unsupported, unsigned, variable


def statements(body: str) -> Iterator[str]:
    """The statements of a function, its labels as "name:", and "{" and "}" of inner scopes."""
    text = ""
    depth = 0  # of braces around operands
    for character in body:
        if character == "{" and not text.strip():
            yield "{"
        elif character == "}" and not text.strip():
            yield "}"
        elif (
            (character == ";" and depth == 0)
            or (character.isspace() and re.fullmatch(r"\s*[$\w]+:", text))
            or (character == "\n" and text.lstrip().startswith((".loc", ".pragma")))
        ):
            yield text.strip()
            text = ""
        else:
            depth += {"{": 1, "}": -1}.get(character, 0)
            text += character


def declaration(text: str) -> str:
    match = re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", text, re.S)
    if not match:
        raise Unsupported(text)
    names = []
    for name in match[2].split(","):
        several = re.fullmatch(r"\s*(%\w+)<(\d+)>\s*", name)
        names += (
            [variable(f"{several[1]}{i}") for i in range(int(several[2]))]
            if several
            else [variable(name.strip())]
        )
    return f"{unsigned(match[1])} {', '.join(names)};"


def translate(ptx: str) -> str:
    """C++ with one function for each kernel: extern "C" void NAME(const uint8_t* params)."""
    files = dict(re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', ptx, re.M))
    ptx = re.sub(r"//[^\n]*", "", ptx)
    if re.search(r"^\s*\.shared", ptx, re.M) or ".local" in ptx:
        raise Unsupported("static shared memory, or arrays that are not in registers")
    shared = set(re.findall(r"^\s*\.extern \.shared [^;]*?([\w$]+)\[\];", ptx, re.M))
    lines = ['#include "machine.h"']
    for name, param, body in re.findall(
        r"\.entry\s+([\w$]+)\(\s*\.param [^)]*?([\w$]+)\[\d+\]\s*\)[^{]*\{(.*?)\n\}", ptx, re.S
    ):
        function = Function(param, shared)
        lines.append(
            f'extern "C" __attribute__((visibility("default"))) void {name}(const uint8_t* params) {{'
        )
        for text in statements(body):
            if text in "{}":
                lines.append(text)
            elif text.endswith(":"):
                lines.append(f"{variable(text[:-1])}: ;")
            elif text.startswith(".reg"):
                lines.append(declaration(text))
            elif text.startswith(".loc"):
                _, number, line, *_ = text.replace(",", " ").split()
                if number in files:
                    lines.append(f'#line {max(1, int(line))} "{files[number]}"')
            elif not text.startswith(".pragma"):
                lines.append(function.instruction(text))
        lines.append("}")
    return "\n".join(lines) + "\n"
