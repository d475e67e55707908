"""The policy file: its text, and a message with a line for everything that can be wrong with it."""

import os
import re
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from autoprec.errors import OutputError, PolicyFileError
from autoprec.policy import (
    Float8,
    LossScale,
    Parameters,
    Policy,
    Rule,
    dump_policy,
    load_policy,
    preset,
    rule_lines,
    save_policy,
    to_plain,
)

POLICY = Policy(
    name="gpt-char-cpu",
    device={"name": "Intel Xeon, AMX", "kind": "cpu"},
    parameters=Parameters(storage="bf16"),
    float32_matmul="bf16",
    loss_scale=LossScale(kind="dynamic", initial=32768, growth_interval=500),
    outputs="computed",
    rules=(
        Rule(sites="blocks.*.attn:softmax", format="fp32", why='a "saturated" softmax'),
        Rule(sites="*:layer_norm", format="as_given"),
        Rule(sites="*", format="bf16"),
    ),
    fallback=Rule(sites="blocks.*", format="fp32", why="safe"),
    evidence={"versions": {"torch": "2.13.0", "autoprec": "0.1.0"}, "graph": "f00", "speedup": 1.5, "seeds": [0, 1]},
)

TEXT = """\
autoprec: 1
name: gpt-char-cpu
device: {kind: cpu, name: "Intel Xeon, AMX"}
parameters: {storage: bf16}
float32_matmul: bf16
loss_scale: {kind: dynamic, initial: 32768, growth_interval: 500, growth_factor: 2, backoff_factor: 0.5, \
minimum: 1, maximum: 16777216}
outputs: computed
rules:  # first match wins
  - {sites: "blocks.*.attn:softmax", format: fp32, why: "a \\"saturated\\" softmax"}
  - {sites: "*:layer_norm",          format: as_given}
  - {sites: "*",                     format: bf16}
fallback: {sites: "blocks.*", format: fp32, why: "safe"}
evidence:
  graph: f00
  seeds: [0, 1]
  speedup: 1.5
  versions: {autoprec: "0.1.0", torch: "2.13.0"}
"""

RULES = 'rules:\n  - {sites: "*", format: fp32}\n'
HEAD = "autoprec: 1\nname: p\n"


def _write(folder: Path, text: str) -> Path:
    path = folder / "policy.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_text_of_a_policy(tmp_path: Path) -> None:
    assert dump_policy(POLICY) == TEXT
    assert load_policy(_write(tmp_path, TEXT)) == POLICY


def test_the_least_policy(tmp_path: Path) -> None:
    path = _write(tmp_path, HEAD + RULES)
    assert load_policy(path) == Policy(name="p", rules=(Rule(sites="*", format="fp32"),))
    assert load_policy(str(path)) == load_policy(path)
    assert dump_policy(load_policy(path)) == (
        HEAD + "parameters: {storage: fp32}\nfloat32_matmul: ieee\nloss_scale: none\noutputs: fp32\n"
        "rules:  # first match wins\n"
        '  - {sites: "*", format: fp32}\nfallback: {sites: "*", format: fp32}\n'
    )


@pytest.mark.parametrize(
    ("loss_scale", "text"),
    [
        (LossScale(), "none"),
        (LossScale(kind="static", initial=8), "{kind: static, initial: 8}"),
        (LossScale(kind="static", initial=0.75, minimum=1e-5), "{kind: static, initial: 0.75, minimum: 1.0e-05}"),
        (LossScale(kind="static", initial=1e20, maximum=1e30), "{kind: static, initial: 1.0e+20, maximum: 1.0e+30}"),
        (LossScale(initial=8), "{kind: none, initial: 8}"),
    ],
)
def test_the_text_of_a_loss_scale(loss_scale: LossScale, text: str, tmp_path: Path) -> None:
    policy = Policy(name="p", rules=(Rule(sites="*", format="fp16"),), loss_scale=loss_scale)
    assert f"\nloss_scale: {text}\n" in dump_policy(policy)
    assert load_policy(_write(tmp_path, dump_policy(policy))) == policy


@pytest.mark.parametrize(
    "name",
    [
        "",
        "null",
        "no",
        "1",
        "1e5",
        "1.0e+5",
        "~",
        "a: b",
        "#x",
        "2026-11-30",
        "é",
        "\x85\u2028\ufeff",
        "0o7",
        "=",
        "<<",
    ],
)
def test_names_that_look_like_something_else_stay_text(name: str, tmp_path: Path) -> None:
    policy = Policy(name=name, rules=(Rule(sites="*", format="fp32"),), evidence={name: name})
    assert load_policy(_write(tmp_path, dump_policy(policy))) == policy


def test_a_file_with_windows_line_ends_is_read(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_bytes(TEXT.replace("\n", "\r\n").encode())
    assert load_policy(path) == POLICY


def test_anchors_are_read(tmp_path: Path) -> None:
    text = HEAD + 'rules:\n  - &all {sites: "*", format: fp32}\nfallback: *all\n'
    assert load_policy(_write(tmp_path, text)).fallback == Rule(sites="*", format="fp32")


def test_lines_of_rules(tmp_path: Path) -> None:
    assert rule_lines(_write(tmp_path, TEXT)) == (9, 10, 11)


def test_plain_policy_has_every_key() -> None:
    plain = to_plain(POLICY)
    assert next(iter(plain)) == "autoprec"
    assert plain["rules"][1] == {"sites": "*:layer_norm", "format": "as_given"}
    assert plain["evidence"]["seeds"] == [0, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ":1: the file is empty; a policy starts with autoprec: 1"),
        ("a: [1", ":1: not YAML: expected ',' or ']', but got '<stream end>'"),
        ("a: 1\n\tb: 2", ":2: not YAML: found character '\\t' that cannot start any token"),
        ("a: \x00", ": not YAML: unacceptable character #x0000"),
        ("[1, 2]", ":1: the policy is a list; expected a mapping (key: value)"),
        ("text", ':1: the policy is text ("text"); expected a mapping'),
        ("name: p\n" + RULES, ":1: not a policy: the key autoprec, the schema version, is missing; add autoprec: 1"),
        ("\n" + HEAD.replace("1", "2") + "new_key: 1", ":2: the policy has schema 2, from a newer autoprec; this one"),
        (HEAD.replace("1", "0"), ":1: the policy has schema 0; schemas: 1 to 1"),
        (HEAD.replace("1", "one"), ':1: autoprec (the schema version) is text ("one"); expected a whole number'),
        (HEAD.replace("1", "true"), ':1: autoprec (the schema version) is true or false ("true"); expected a whole'),
        (HEAD, ':1: the policy has no key "rules"; add it'),
        ("autoprec: 1\n" + RULES, ':1: the policy has no key "name"; add it'),
        (
            HEAD + RULES + "rule: 1",
            ':5: the policy has no key "rule"; keys: autoprec, name, device, parameters, float32_matmul, '
            "float8, loss_scale, memory_format, optimizer, compile, outputs, rules, fallback, evidence; "
            'nearest: "rules"',
        ),
        (HEAD + RULES + "name: q", ':5: the policy has the key "name" twice; delete one'),
        (HEAD + RULES + "1: q", ':5: a key of the policy is a whole number ("1"); expected text; quote it'),
        (HEAD + RULES + "<<: {a: 1}", ":5: a key of the policy is merge"),
        ("autoprec: 1\nname: 7\n" + RULES, ':2: name is a whole number ("7"); expected text; quote it if it is meant'),
        ("autoprec: 1\nname: [a]\n" + RULES, ":2: name is a list; expected text or a number"),
        ("autoprec: 1\nname: 2026-11-30\n" + RULES, ":2: name is timestamp"),
        (HEAD + "rules: fp32", ':3: rules is text ("fp32"); expected a list (a line with - for each)'),
        (HEAD + "rules: []", ':3: policy "p": it has no rules; the last rule must catch every site'),
        (HEAD + 'rules:\n  - {sites: "a", format: fp32}', ':4: policy "p": its last rule is "a"; the last rule must'),
        (HEAD + "rules:\n  - a", ':4: a rule is text ("a"); expected a mapping'),
        (HEAD + 'rules:\n  - {sites: "a"}', ':4: a rule has no key "format"; a rule reads {sites: "*", format: fp32}'),
        (HEAD + "rules:\n  - {format: fp32}", ':4: a rule has no key "sites"'),
        (HEAD + 'rules:\n  - {sites: "*", fromat: fp32}', ':4: a rule has no key "fromat"; keys: sites, format, why'),
        (HEAD + 'rules:\n  - {sites: "*", format: 32}', ':4: format of a rule is a whole number ("32"); expected text'),
        (HEAD + 'rules:\n  - {sites: "*", format: bf61}', ':4: rule "*": "bf61" is not a format; formats: fp32,'),
        (
            HEAD + 'rules:\n  - {sites: "a:sofmax", format: fp32}\n  - {sites: "*", format: fp32}',
            ':4: pattern "a:sofmax": op "sofmax" is not in the catalog; nearest: "softmax"',
        ),
        (HEAD + "rules:\n  - {sites: *x, format: fp32}", ":4: not YAML: found undefined alias 'x'"),
        (HEAD + RULES + "device: {knid: cpu}", ':5: device has no key "knid"; keys: kind, name; nearest: "kind"'),
        (HEAD + RULES + "parameters: {storage: fp8}", ":5: parameters.storage is 'fp8'; allowed: fp32, bf16, fp16"),
        (HEAD + RULES + "float8: {scaling: rows}", ":5: float8.scaling is 'rows'; allowed: tensorwise, rowwise"),
        (
            HEAD + RULES + "memory_format: nhwc",
            ":5: memory_format is 'nhwc'; allowed: as_given, channels_last",
        ),
        (HEAD + RULES + "compile: eager", ":5: compile is 'eager'; allowed: as_given, inductor"),
        (HEAD + RULES + "optimizer: foreach", ":5: optimizer is 'foreach'; allowed: as_given, fused"),
        (HEAD + RULES + "float8: {scale: rowwise}", ':5: float8 has no key "scale"; keys: scaling'),
        (
            HEAD + RULES.replace("rules:", "rules:\n  - {sites: a, format: fp8_e4m3}"),
            ':4: rule "a": fp8_e4m3 is for linear, matmul',
        ),
        (HEAD + RULES + "parameters: {master: fp32}", ":5: parameters have master: fp32 beside storage: fp32; write"),
        (HEAD + RULES + "parameters: {kept: []}", ':5: parameters has no key "kept"; keys: storage, master, rounding'),
        (HEAD + RULES + "parameters: {keep: norm}", ':5: parameters.keep is text ("norm"); expected a list'),
        (HEAD + RULES + "parameters: {keep: [1]}", ':5: a glob of parameters.keep is a whole number ("1")'),
        (HEAD + RULES + "float32_matmul: fp16", ":5: float32_matmul is 'fp16'; allowed: ieee, tf32, bf16"),
        (HEAD + RULES + "\noutputs: bf16", ":6: outputs is 'bf16'; allowed: fp32, computed"),
        (HEAD + RULES + "loss_scale: dynamic", ':5: loss_scale is text ("dynamic"); expected a mapping'),
        (HEAD + RULES + "loss_scale: {initial: 8}", ':5: loss_scale has no key "kind"; kinds: none, static, dynamic'),
        (
            HEAD + RULES + "loss_scale: {kind: static, initial: 1e-5}",
            ':5: loss_scale.initial is text ("1e-5"); expected',
        ),
        (HEAD + RULES + "loss_scale: {kind: static, initial: -1}", ":5: loss_scale.initial is -1; allowed: minimum"),
        (
            HEAD + RULES + "loss_scale: {kind: dynamic, growth_interval: 1.5}",
            ":5: loss_scale.growth_interval is a number",
        ),
        (HEAD + RULES + "fallback: {sites: '*'}", ':5: fallback has no key "format"'),
        (HEAD + RULES + "evidence: 3", ':5: evidence is a whole number ("3"); expected a mapping'),
        (HEAD + RULES + "evidence:\n  a: {b: 1, b: 2}", ':6: evidence.a has the key "b" twice'),
        (HEAD + RULES + "evidence:\n  a: 2026-11-30", ':6: evidence.a is timestamp ("2026-11-30"); expected text or a'),
        (
            HEAD + RULES + "evidence:\n  a: !!python/none x",
            ':6: evidence.a is python/none ("x"); expected text or a number',
        ),
        (HEAD + RULES + "evidence:\n  a: !!int x", ':6: evidence.a is "x", which cannot be read as a whole number'),
        (HEAD + RULES + "evidence: &a {b: *a}", ":5: evidence is nested too deep, or contains itself"),
        (HEAD + RULES + "---\na: 1", ":5: not YAML: but found another document"),
        (HEAD + RULES + "evidence: " + "[" * 3000, ": n"),
    ],
)
def test_what_is_refused_and_where(text: str, message: str, tmp_path: Path) -> None:
    path = _write(tmp_path, text)
    with pytest.raises(PolicyFileError, match=re.escape(f"{path}{message}")):
        load_policy(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    missing = tmp_path / "missing.yaml"
    with pytest.raises(PolicyFileError, match=re.escape(f"{missing}: the policy file cannot be read: No such file")):
        load_policy(missing)
    with pytest.raises(PolicyFileError, match=re.escape(f"{tmp_path}: the policy file cannot be read: Is a directory")):
        load_policy(tmp_path)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PolicyFileError, match=re.escape(f"{binary}: the policy file cannot be read: 'utf-8' codec")):
        load_policy(binary)


def test_saving_replaces_the_file_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    save_policy(preset("fp32", "cpu"), path)
    save_policy(POLICY, path)
    assert path.read_text(encoding="utf-8") == TEXT
    assert [item.name for item in tmp_path.iterdir()] == ["policy.yaml"]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "policy.yaml"
    message = f"cannot write {path}: No such file or directory; free some space or name another place"
    with pytest.raises(OutputError, match=re.escape(message)):
        save_policy(POLICY, path)


def test_a_folder_in_the_way_is_named(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=re.escape(f"cannot write {tmp_path}: ")):
        save_policy(POLICY, tmp_path)
    assert list(tmp_path.parent.glob(f".{tmp_path.name}*")) == []


def test_a_full_disk_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "policy.yaml"
    save_policy(preset("fp32", "cpu"), path)
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match="No space left on device; free some space or name another place"):
        save_policy(POLICY, path)
    assert path.read_bytes() == before
    assert [item.name for item in tmp_path.iterdir()] == ["policy.yaml"]


def test_the_example_of_the_design_page_is_close(tmp_path: Path) -> None:
    text = textwrap.dedent("""\
        autoprec: 1                       # schema
        name: gpt-char-cpu
        device: {kind: cpu, name: "Intel Xeon, AMX"}
        parameters: {storage: fp32}
        float32_matmul: bf16              # ieee | tf32 | bf16: inside FP32 matmuls
        loss_scale: {kind: dynamic, initial: 32768, growth_interval: 500, minimum: 1}
        rules:                            # first match wins
          - {sites: "blocks.*.attn:softmax", format: fp32, why: "log of a saturated softmax 6 ops downstream"}
          - {sites: "*:layer_norm",          format: bf16, why: "fused kernel accumulates in fp32; saves casts"}
          - {sites: "*",                     format: bf16}
        fallback: {sites: "*", format: fp32}
        evidence: {graph: abc}
    """)
    policy = load_policy(_write(tmp_path, text))
    assert len(policy.rules) == 3
    assert policy.loss_scale == LossScale(kind="dynamic", initial=32768, growth_interval=500)


def test_the_scaling_is_written_where_it_is_not_the_default() -> None:
    policy = Policy(name="p", rules=(Rule(sites="*", format="fp32"),))
    assert "float8" not in dump_policy(policy)
    rowwise = dump_policy(replace(policy, float8=Float8(scaling="rowwise")))
    assert "\nfloat32_matmul: ieee\nfloat8: {scaling: rowwise}\nloss_scale: none\n" in rowwise


def test_the_layout_is_written_where_it_is_not_the_default() -> None:
    policy = Policy(name="p", rules=(Rule(sites="*", format="fp32"),))
    assert "memory_format" not in dump_policy(policy)
    laid = dump_policy(replace(policy, memory_format="channels_last"))
    assert laid.replace("memory_format: channels_last\n", "") == dump_policy(policy)
    assert "\nloss_scale: none\nmemory_format: channels_last\noutputs: fp32\n" in laid


def test_fused_optimizers_are_written_where_they_are_asked_for() -> None:
    policy = Policy(name="p", rules=(Rule(sites="*", format="fp32"),))
    assert "optimizer" not in dump_policy(policy)
    fused = dump_policy(replace(policy, optimizer="fused"))
    assert "\nloss_scale: none\noptimizer: fused\noutputs: fp32\n" in fused


def test_compilation_is_written_where_it_is_asked_for(tmp_path: Path) -> None:
    policy = Policy(name="p", rules=(Rule(sites="*", format="fp32"),))
    assert "compile" not in dump_policy(policy)
    compiled = replace(policy, optimizer="fused", compile="inductor")
    assert "\noptimizer: fused\ncompile: inductor\noutputs: fp32\n" in dump_policy(compiled)
    assert load_policy(_write(tmp_path, dump_policy(compiled))) == compiled


def test_parameters_state_what_is_not_default() -> None:
    for parameters, text in (
        (Parameters(), "{storage: fp32}"),
        (Parameters(optimizer_state="8bit"), '{storage: fp32, optimizer_state: "8bit"}'),
        (
            Parameters(storage="bf16", master="fp32", gradients="storage", keep=("*norm*", "embed.weight")),
            '{storage: bf16, master: fp32, gradients: storage, keep: ["*norm*", embed.weight]}',
        ),
        (Parameters(storage="bf16", rounding="stochastic"), "{storage: bf16, rounding: stochastic}"),
    ):
        policy = Policy(name="p", rules=(Rule(sites="*", format="bf16"),), parameters=parameters)
        assert f"\nparameters: {text}\n" in dump_policy(policy)


def test_parameters_read_without_quotes(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(HEAD + RULES + "\nparameters: {storage: bf16, master: none, optimizer_state: 8bit, keep: []}")
    assert load_policy(path).parameters == Parameters(storage="bf16", optimizer_state="8bit")
