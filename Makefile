# Every target sets up .venv by itself and says what it does.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CONSTRAINTS := $(if $(findstring python3.11,$(PYTHON)),-c constraints.txt)
RUNS := $(VENV)/.installed-to-run
WEB := tests/web/node_modules/.installed
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile $(CONSTRAINTS)

.PHONY: demo test test-fast wheel constraints conditions test-torch check check-web serve quick-start bench exactness chaos simulate zombies webhooks faults trackers own-logging fuzz teardown containers clean

# what runs jobs, and no more. torch 2.13.0: the version that most tests were run with; torch>=2.9 would fetch the newest.
# --no-compile: of some 9,000 modules a job imports a third, and each is compiled when it is imported first
$(RUNS): pyproject.toml constraints.txt deploy/constraints.txt
	@echo "==> creating $(VENV) and installing Ratchet and what runs jobs (first time: a minute, and the download of torch)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) torch==2.13.0 -e ".[service,worker]"
	@touch $(RUNS)

# Everything is compiled at once, by all cores: of what a test imports first, a warning of the compiler would be the test's error
$(STAMP): $(RUNS)
	@echo "==> installing the development tools into $(VENV) (first time: a few minutes)"
	$(PIP_INSTALL) torch==2.13.0 -e ".[dev]"
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib; true  # some files are for newer versions of Python
	@touch $(STAMP)

demo: $(RUNS)
	@echo "==> main job on real data: killed, preempted, service restarted; compared with an undisturbed run"
	$(BIN)/python -m examples.demo

# pytest rewrites every test's assertions: once, not in each of its processes
CACHE_TESTS = env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -q -n0 --collect-only
test: $(STAMP) $(WEB)
	@echo "==> running the tests"
	@$(BIN)/python -m compileall -q -j 0 client contract hooks migrations service store worker tests/support  # once, not in each of a thousand processes
	@ls tests/__pycache__/conftest.*-pytest-*.pyc >/dev/null 2>&1 || { $(CACHE_TESTS) tests/unit tests/architecture >/dev/null & $(CACHE_TESTS) tests/e2e tests/integration >/dev/null; wait; }
	$(BIN)/python -m pytest -n $(or $(JOBS),6) --dist loadfile --no-loadscope-reorder

# the rules without I/O and the small parts: no torch, no processes, within a minute
test-fast: $(STAMP)
	@echo "==> running the fast unit tests"
	@$(BIN)/python -m pytest -q -n $(or $(JOBS),2) --dist loadfile -m "not processes" tests/unit/client tests/unit/contract tests/unit/service tests/unit/store

# both wheels into dist/; the quick start builds and installs them in the same way (tests/e2e/test_quick_start.py)
wheel: $(STAMP)
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist . ./hooks
	@ls dist/*.whl

# the newest versions, into both files of constraints: a fresh environment that has none; make test afterwards
constraints:
	$(MAKE) VENV=.venv-newest CONSTRAINTS= .venv-newest/.installed
	.venv-newest/bin/python deploy/constraints.py > .venv-newest/images && .venv-newest/bin/python deploy/constraints.py --tests > .venv-newest/tests
	mv .venv-newest/images deploy/constraints.txt && mv .venv-newest/tests constraints.txt
	rm -rf .venv-newest

# all tests once under each condition that a developer's machine seldom has, a quarter of an hour each: ONLY="boot order"
conditions: $(STAMP)
	@echo "==> the tests as a minute after boot, in another time zone, as another user, without a HOME, in random order, on one CPU"
	$(BIN)/python -m tests.support.conditions $(ONLY)

# the tests that depend on torch, on TORCH=2.11.0 (or oldest, newest) under PYTHON=python3.12, in .venv-torch/; docs/torch-versions.md
test-torch:
	@PYTHONPATH=hooks python3 -m tests.support.torch_versions $(or $(TORCH),oldest) --python $(PYTHON) --jobs $(or $(JOBS),2)

check: $(STAMP) check-web
	@echo "==> ruff, mypy --strict, import rules"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.support.plain_words

# what developers of the web pages need, from npm; nobody needs it to run Ratchet
$(WEB): tests/web/package-lock.json
	@echo "==> npm packages for the checks of the web pages"
	@if command -v npm >/dev/null && timeout 120 npm ci --silent --fetch-retries=0 --fetch-timeout=20000 --prefix tests/web; then touch $@; \
	  else echo "not to be had (npm, or its registry): types, eslint and axe of the web pages are left out"; fi

check-web: $(WEB)
	@if test -e $(WEB); then echo "==> types, eslint and functions of the web pages" && npm run --silent --prefix tests/web check && npm test --silent --prefix tests/web -- --test-reporter=dot; fi

serve: $(RUNS)
	$(BIN)/ratchet serve

# the quick start's and the README's commands, typed in a new home with 30 s between them; pip installs what they say. 20 minutes
quick-start: $(STAMP)
	RATCHET_TEST_QUICK_START=slow $(BIN)/python -m pytest -v -n0 --timeout=3600 tests/e2e/test_quick_start.py

GATED_TESTS = $(shell grep -rlE "full_matrix|takes_turns|ON_ENGINES|RATCHET_TEST_(STRIKES|PROVE|SEEDS|OPTIONS)" tests --include="test_*.py" | sort)
exactness: $(STAMP)
	$(BIN)/python -m tests.e2e.exactness --n $(or $(N),24)
	$(BIN)/python -m tests.support.planted_runs
	RATCHET_TEST_STRIKES=all RATCHET_TEST_PROVE=all RATCHET_TEST_SEEDS=5 RATCHET_TEST_OPTIONS=all RATCHET_TEST_DATABASES=all $(BIN)/python -m pytest -v --timeout=7200 $(GATED_TESTS)
	RATCHET_TEST_LIGHTNING=all $(BIN)/python -m pytest -v --timeout=7200 tests/integration/worker/integrations/test_lightning_exact.py
	RATCHET_TEST_CLEAN=all $(BIN)/python -m pytest -v --timeout=7200 tests/integration/worker/state/test_public_models_strict.py

# N faults by seed (SEED=), half on each database, a job for every five; with N=500 about 20 minutes on two cores. Half of the
# services keep parked agents. Afterwards no process, port, descriptor, shared memory or memory is held more. What failed is
# told with its seed, its log and the command that runs it again
chaos: $(STAMP)
	@echo "==> random faults over many jobs: none lost, none twice, nothing left, all final checkpoints as undisturbed"
	$(BIN)/python -m tests.e2e.chaos --n $(or $(N),40) --seed $(or $(SEED),1)

# the control plane by seeds, in as many processes as there are cores, each with a database of its own. First every planted fault
# must be found. Then N schedules of each kind: with few faults, with many, of 80 moves instead of 20, and on PostgreSQL.
# A core runs about five schedules of 20 moves per second, or two of 80: with N=1000 about 12 minutes on two idle cores. One again:
# python -m tests.support.sim --seed S --n 1 [--storm] [--moves 80] [--postgres]
simulate: $(STAMP)
	$(BIN)/python -m tests.support.sim --mutants --n 5000
	$(BIN)/python -m tests.support.sim --n $(or $(N),1000)
	$(BIN)/python -m tests.support.sim --n $(or $(N),1000) --storm --seed 1000000
	$(BIN)/python -m tests.support.sim --n $(or $(N),1000) --storm --moves 80 --seed 2000000
	$(BIN)/python -m tests.support.sim --n $(or $(N),1000) --storm --postgres --seed 3000000

# N attempts stopped for longer than their lease, replaced, and let go on: nothing that they write then may count
zombies: $(STAMP)
	RATCHET_TEST_ZOMBIES=$(or $(N),100) $(BIN)/python -m pytest -v -s --timeout=7200 tests/integration/service/reconciler/test_zombies.py

# N events to a webhook whose receiver refuses, hangs, lies and is down for some time, and N/100 SIGKILLs of the service; with N=1000
# about two minutes
webhooks: $(STAMP)
	RATCHET_TEST_WEBHOOKS=$(or $(N),1000) $(BIN)/python -m pytest -v -s --timeout=7200 tests/integration/service/webhooks/test_kill.py

# N kills of a saving process and of real ranks, with torch.save in place as their control; N corruptions of each of 13 kinds;
# power lost at every system call; full, slow and failing disks. With N=1000 ten to thirty minutes on two cores
faults: $(STAMP)
	@echo "==> faults of processes, disks and power beneath saves; each test prints what it counted"
	RATCHET_TEST_KILLS=$(or $(N),1000) RATCHET_TEST_RANK_KILLS=$(or $(N),1000) RATCHET_TEST_TRIALS=$(or $(N),1000) \
	  RATCHET_TEST_RESIZES=$(or $(N),1000) RATCHET_TEST_MEMORY_KILLS=$(or $(N),1000) \
	  $(BIN)/python -m pytest -v -s --timeout=7200 \
	  tests/integration/worker/checkpoint/test_kill_while_saving.py \
	  tests/integration/worker/checkpoint/test_kills_with_copies.py tests/integration/store/write/test_kill.py tests/unit/store/read/test_damage.py \
	  tests/integration/store/write/test_crash_points.py tests/integration/worker/checkpoint/test_failing_disks.py tests/unit/store/read/test_hostile_checkpoints.py \
	  tests/integration/worker/checkpoint/test_tensor_resizing.py

# N kills of ranks, agents and services, drawn by seed (SEED=), of jobs that experiment trackers get the metrics of
trackers: $(STAMP)
	@echo "==> killed jobs in real trackers: one run of each, each step once, with the values of an undisturbed job"
	RATCHET_TEST_TRACKER_KILLS=$(or $(N),100) RATCHET_TEST_SEED=$(or $(SEED),1) \
	  $(BIN)/python -m pytest -v -s --timeout=3600 tests/e2e/test_trackers.py tests/integration/service/trackers/test_wandb_online.py

# scripts that keep their own loggers: N jobs of each kind, killed at drawn steps, and the plain ways as their control; about half a
# minute for each of the N on two cores
own-logging: $(STAMP)
	@echo "==> loggers of scripts: each step once, however often the job is killed; the plain ways double steps"
	RATCHET_TEST_LOGGING=$(or $(N),100) $(BIN)/python -m pytest -v -s -n0 --timeout=36000 \
	  tests/integration/worker/session/test_own_logging.py tests/integration/worker/session/test_own_logging_mlflow.py \
	  tests/integration/worker/integrations/test_tensorboard_loggers.py

# N calls of every operation of the API, made up from its OpenAPI description, on SQLite and a quarter of them on PostgreSQL
fuzz: $(STAMP)
	@echo "==> calls made up from the API's description: every answer must be a documented one"
	RATCHET_TEST_EXAMPLES=$(or $(N),200) RATCHET_TEST_DATABASES=all $(BIN)/python -m pytest -v -n0 --timeout=7200 tests/integration/service/api/test_schemathesis.py

# both images and docker-compose.yml with a real Docker engine: built, killed, stopped, replaced, compared; ten minutes or more. FILE=
# one more compose file, for what a machine needs to build
containers:
	@python3 tests/e2e/containers.py $(if $(FILE),--file $(FILE))

# groups of two ranks that are started and stopped: no rank may abort at its end
teardown: $(STAMP)
	$(BIN)/python -m tests.e2e.teardown --n $(or $(N),1000)

# ONLY=checkpoint, step, hooks, startup, service, queue, series, ui (needs chromium), launchers (needs root and Slurm), paper, accuracy, kills or network (needs root); benchmarks/README.md tells how to read them
bench: $(STAMP)
	@echo "==> benchmarks: ratios against a named alternative in the same run; a machine that does nothing else gives narrow intervals"
	$(BIN)/python -m benchmarks $(if $(ONLY),--only $(ONLY))

# all that needs CUDA, each row with a verdict; DEVICE=cpu tries the rows without a GPU. Neither .venv nor an installed Ratchet is
# needed: PYTHON=python3 with torch, WHEELS= a directory with what it lacks (python -m tests.gpu.wheels --to DIR), OUT=, MINUTES=,
# ONLY="hooks-gloo jobs", SIZE=full, small or cheap; benchmarks/README.md tells how to read it
gpu:
	$(if $(filter file,$(origin PYTHON)),python3,$(PYTHON)) -m tests.gpu --device $(or $(DEVICE),cuda) \
	  --out $(or $(OUT),gpu-results) --minutes $(or $(MINUTES),15) \
	  $(if $(WHEELS),--wheels $(WHEELS)) $(if $(SIZE),--size $(SIZE)) $(if $(ONLY),--only $(ONLY))

.PHONY: gpu

clean:
	rm -rf $(VENV) .ratchet
