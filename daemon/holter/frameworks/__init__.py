"""Where holter meets training frameworks, inside the rank: one folder each, behind the protocol of `holter.rank.framework`.

    attach.py  autoload.py              ways to begin; each ends in `attach.attach`
    halts.py                            what saves when a halt is decided, and reads it back
    loggers.py  place.py                trackers that scripts log to; which rank this process is
    saving/                             what keepers share: random states, averages, reading a checkpoint back
    all.py                              ALL, the one list of frameworks

A new framework is a folder, a line in `all.py`, and a page in the documentation. The folder has

    __init__.py     a docstring
    framework.py    a subclass of `Framework` that overrides what this framework knows; it imports neither torch nor the framework
    keeper.py       saves a halted run by the framework's own functions; imported when a save has been decided

and this would be enough for one whose `Coach` object holds the optimizer and can save itself:

    # frameworks/coach/framework.py
    class Coach(Framework):
        name = checkpoint = "coach"
        resume = "coach.load({path!r})"
        module, owner = "coach.training", "Coach"           # asked once the script has imported coach.training
        saves = (SaveFunction("coach.training", "Coach", "save"),)    # shown as a save, so that it is not taken for a hang

        def count_steps(self, optimizer):
            return next((coach.num_steps for coach in self.owners([optimizer])), None)

        def keeper(self, context, optimizers):
            for coach in self.owners(optimizers):
                from holter.frameworks.coach.keeper import CoachKeeper
                return CoachKeeper(coach)

    # frameworks/coach/keeper.py
    class CoachKeeper:
        framework, rescues_alone = "coach", False

        def __init__(self, coach):
            self._coach = coach

        def save(self, task):
            if task.is_rescue:
                raise SaveError("Coach saves by collectives, and ranks are blocked")
            self._coach.save(task.state)
            random_states.write(task, {})

        def live(self):
            yield from self._coach.model.state_dict().items()      # each must be found again in the files, bit for bit

What is not overridden stays harmless: without `registered` and `counters` the objects that a script registers are saved as they are, and
snapshots do not put the framework's own counters back.
"""
