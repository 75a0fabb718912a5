# Scripts that keep their own loggers: N jobs of each kind with drawn kills, and the plain ways as their control. About half a minute
# for each of the N on two cores; each test prints how many points were doubled.
.PHONY: own-logging
own-logging: $(STAMP)
	RATCHET_TEST_LOGGING=$(or $(N),100) $(BIN)/python -m pytest -v -s -n0 --timeout=36000 \
	  tests/integration/worker/session/test_own_logging.py tests/integration/worker/session/test_own_logging_mlflow.py \
	  tests/integration/worker/integrations/test_tensorboard_loggers.py
