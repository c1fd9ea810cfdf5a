"""Makes the workflows of example_workflows/ anew: python -m tests.browser.templates"""
