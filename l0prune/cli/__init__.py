"""Command line: l0prune survey, gate, fit, finetune, export, evaluate, run, recipes, …"""
