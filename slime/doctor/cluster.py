"""The Ray cluster that a run would join, or start."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from slime.doctor.finding import Finding

JOIN_SECONDS = 60
# Joining is what a run does too; here in a process of its own, which can be given up.
_ASK = """
import json, logging, ray
try:
    ray.init(address="auto", logging_level=logging.ERROR, log_to_driver=False)
except ConnectionError as error:
    print(json.dumps({"error": str(error)}))
else:
    alive = sum(node["Alive"] for node in ray.nodes())
    print(json.dumps({"total": ray.cluster_resources(), "free": ray.available_resources(), "nodes": alive}))
"""


def check_cluster(seconds: float = JOIN_SECONDS) -> Finding:
    """Resources of the cluster of RAY_ADDRESS or of this machine; without one, what a run would start."""
    address = os.environ.get("RAY_ADDRESS")
    named = address not in (None, "", "auto", "local")
    fix = f"is the cluster of RAY_ADDRESS={address} up? `ray status`" if named else "`ray stop`, if it is yours"
    try:
        result = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return Finding("fail", "ray cluster", f"no answer within {seconds:g} s", fix)
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines() or ["no answer"]
        return Finding("fail", "ray cluster", lines[-1], fix)
    answer = json.loads(result.stdout.strip().splitlines()[-1])
    if "error" in answer:
        if named:
            return Finding("fail", "ray cluster", " ".join(answer["error"].split()), fix)
        return Finding("ok", "ray cluster", "none is running: a run starts one on this machine and ends it")
    return describe(answer["total"], answer["free"], answer["nodes"])


def describe(total: dict[str, float], free: dict[str, float], nodes: int) -> Finding:
    """What the cluster has of this device; a run waits for devices that others hold."""
    from slime.utils import accelerator

    resource = accelerator.current().ray_resource
    names = dict.fromkeys(("CPU", resource))
    shown = ", ".join(f"{free.get(name, 0):g} of {total.get(name, 0):g} {name}" for name in names)
    text = f"{nodes} node(s), free: {shown}"
    if not total.get(resource):
        return Finding("fail", "ray cluster", f"{text}: no {resource}", "start Ray where the devices are")
    if not free.get(resource):
        return Finding("note", "ray cluster", f"{text}: all are taken", "a run waits until some are given back")
    return Finding("ok", "ray cluster", text)
