"""Plans a model, prints its figures, and writes the plan and its report: `python examples/plan_a_model.py`."""

import debubble as db

model = db.models["llama2-7b"]  # or db.Model.from_hf("config.json")
cluster = db.Cluster.parse("4xA100-80GB")
plan = db.plan(model, cluster, micro_batches=16, sequence_length=4096, planner="adapipe")

timeline = plan.simulate()
print(f"{plan.schedule.name}: {timeline.makespan:.3f} s, {100 * timeline.bubble_fraction:.1f}% bubble")
for device, peak in enumerate(timeline.peak_memory):
    print(f"device {device}: {peak / 2**30:.1f} GiB")

plan.save("plan.json")
plan.show().save("plan.html")
