.PHONY: help demo test test-slow test-clusters lint format bench lock clean
