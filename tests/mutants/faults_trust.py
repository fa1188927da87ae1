"""Data of others that name code, programs and files."""

from tests.mutants.fault import Fault

_TRUST = "vla_rl/contract/trust.py"
_HOSTILE = "tests/cli/test_hostile.py"
_KINDS = "checkpoint run dataset robot fleet trace size"
_CHECKPOINTS, _RUNS, _DATASETS, _ROBOTS, _FLEETS, _TRACES, _SIZES = (
    f"{_HOSTILE}::test_what_is_hostile_is_refused[{kind}]" for kind in _KINDS.split()
)

FAULTS = (
    Fault(
        "what data name is loaded whoever wrote them",
        _TRUST,
        "        if origins is None:",
        "        if False:",
        (_CHECKPOINTS, _RUNS),
    ),
    Fault(
        "the environment of a run of others is read though the user names another",
        "vla_rl/cli/eval_checkpoint.py",
        "    default = Evaluate(env=env_config_of(checkpoint, named) or NO_ENV,",
        "    default = Evaluate(env=env_config_of(checkpoint) or NO_ENV,",
        (f"{_HOSTILE}::test_an_environment_that_the_user_names_stands_for_that_of_a_run",),
    ),
    Fault(
        "the environment that a user names is taken with what a run of others says of it",
        "vla_rl/recipes/saved.py",
        ' and not (isinstance(saved, dict) and saved.get("name") == named):',
        ":",
        (f"{_HOSTILE}::test_an_environment_that_the_user_names_stands_for_that_of_a_run",),
    ),
    Fault(
        "an observation may be of any size",
        "vla_rl/contract/spec.py",
        "            if (numbers := sum(math.prod(part.shape) for part in parts)) > MOST_NUMBERS:",
        "            if (numbers := sum(math.prod(part.shape) for part in parts)) < 0:",
        (_CHECKPOINTS,),
    ),
    Fault(
        "the footer of a parquet file is believed",
        "vla_rl/experience/lerobot/parquet.py",
        "        check_memory(max((max(size.page, 8 * size.values) for size in sizes), default=0), disk)",
        "",
        (_DATASETS,),
    ),
    Fault(
        "columns with points in their names are read unchecked",
        "vla_rl/experience/lerobot/parquet.py",
        '            if f"{part.path_in_schema}.".startswith(names)',
        '            if part.path_in_schema.partition(".")[0] in columns',
        (_DATASETS,),
    ),
    Fault(
        "an environment that starts programs counts as harmless",
        _TRUST,
        '    if config.get("name") not in ENVIRONMENTS:',
        '    if ":" in str(config.get("name")):',
        (_RUNS,),
    ),
    Fault(
        "a config file of others is run",
        "vla_rl/recipes/config_files.py",
        "            require_own(read_bytes(kept),",
        "            print(read_bytes(kept),",
        (_RUNS,),
    ),
    Fault(
        "a module of the same name elsewhere is taken for the user's",
        _TRUST,
        "            if now != origins.get(name):",
        "            if False:",
        (f"{_HOSTILE}::test_another_module_of_the_same_name_is_not_the_users",),
    ),
    Fault(
        "--trust is forgotten",
        _TRUST,
        "        mark(data)  # asked once",
        "        pass",
        (f"{_HOSTILE}::test_trust_is_asked_for_once",),
    ),
    Fault(
        "a robot file of others loads any class",
        "robot_drivers/config.py",
        "            require_own(named,",
        "            print(named,",
        (_ROBOTS,),
    ),
    Fault(
        "a robot file of others names files and addresses",
        "robot_drivers/config.py",
        "        if value and not _DEVICE.fullmatch(value) and",
        "        if False and",
        (_ROBOTS,),
    ),
    Fault(
        "another option of one's own driver is trusted as well",
        "robot_drivers/config.py",
        "                yield reaching, json.dumps(dataclasses.asdict(part), sort_keys=True).encode()",
        "                yield reaching, part.name.encode()",
        (f"{_HOSTILE}::test_ones_own_driver_is_trusted_once_and_the_rest_of_its_file_is_edited_freely",),
    ),
    Fault(
        "a simulated robot's file of others names an environment",
        "robot_drivers/simulated_process.py",
        "    if config.record or config.robot != Simulated():",
        "    if False:",
        (f"{_HOSTILE}::test_a_simulated_robots_file_of_others_starts_nothing",),
    ),
    Fault(
        "a dataset's paths lead anywhere",
        "vla_rl/experience/lerobot/metadata.py",
        '            raise ValueError(f"its {name} {str(path)[:80]!r} is no path in the dataset")',
        "            pass",
        (_DATASETS,),
    ),
    Fault(
        "a commit of others removes files outside",
        "vla_rl/experience/lerobot/live.py",
        '                raise ValueError("it names what is not in the dataset")',
        "                pass",
        (_DATASETS,),
    ),
    Fault(
        "links out of a folder are followed",
        _TRUST,
        "    if not _all and not any(target.is_relative_to(home) for home in homes):",
        "    if False:",
        (_DATASETS, _FLEETS, _SIZES),
    ),
    Fault(
        "a few bytes fill the memory",
        _TRUST,
        "    if size > max(_HARMLESS, ratio * stored):",
        "    if False:",
        (_DATASETS, _TRACES),
    ),
    Fault(
        "a picture is larger than declared",
        "vla_rl/experience/lerobot/video.py",
        'return {"max_pixels": str(max(math.prod(shape), _SMALL))}',
        "return {}",
        (_DATASETS,),
    ),
    Fault(
        "a layer of any width is built",
        "vla_rl/pretrained.py",
        "            self.require(size)",
        "            pass",
        (_SIZES,),
    ),
    Fault(
        "any number of layers is built",
        "vla_rl/pretrained.py",
        "        for number in _whole_numbers(config):",
        "        for number in ():",
        (_SIZES,),
    ),
    Fault(
        "a registry's version is anything",
        "vla_rl/fleet/registry.py",
        "            if all(type(one) is int and 0 < one < MOST_VERSIONS for one in versions):",
        "            if True:",
        (_FLEETS,),
    ),
    Fault(
        "a client of a served environment names programs",
        "sims/isolation/server.py",
        '        check_options(fields.get("options"), "a client")',
        "        pass",
        ("tests/sims/isolation/test_remote.py::test_a_client_names_no_code_programs_or_files",),
    ),
    Fault(
        "texts of others steer the terminal",
        "vla_rl/recipes/tables.py",
        "    return Text(printable(text), style)",
        "    return Text(text, style)",
        (_SIZES,),
    ),
    Fault(
        "shards of weights lie anywhere",
        "vla_rl/policies/vla/weights.py",
        "        if Path(name).name != name:",
        "        if False:",
        ("tests/policies/vla/test_weights.py::test_shards_lie_in_the_folder",),
    ),
    Fault(
        "a template of data is a format string",
        "vla_rl/policies/vla/tokenizer.py",
        'self.template.replace("{}", text.rstrip("\\n"))',
        'self.template.format(text.rstrip("\\n"))',
        ("tests/policies/vla/test_tokenizer.py::test_a_template_is_text",),
    ),
)
