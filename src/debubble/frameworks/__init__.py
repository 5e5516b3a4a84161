"""The frameworks that run plans, a folder each.

* `target.py`: what the framework can run, in the words of `debubble.targets`.
* `export.py`: the files with which it runs a plan, by the helpers of `debubble.exports`.
* `import_.py`: the job that its configuration describes, by the readers of `debubble.imports`.

The registries load these modules by their names, so that nothing else imports a framework.
"""
