/* The extension module cdist._core: its state, and the rooms that fill it. */
#include "py/state.h"

#include "base/host.h"
#include "py/arena.h"
#include "py/array.h"
#include "py/array_pickle.h"
#include "py/collectives.h"
#include "py/errors.h"
#include "py/gpu.h"
#include "py/group.h"
#include "py/host_side.h"
#include "py/recorder.h"
#include "py/redop.h"
#include "py/reducer.h"
#include "py/sampler.h"
#include "py/settings.h"
#include "py/store.h"
#include "py/work.h"

static int traverse_state(PyObject *module, visitproc visit, void *arg)
{
    cd_py_state *state = cd_py_state_of(module);
    if (!state)
        return 0;
#define X(name) Py_VISIT(state->name);
    CD_PY_STATE_OBJECTS(X)
#undef X
    return 0;
}

static int clear_state(PyObject *module)
{
    cd_py_state *state = cd_py_state_of(module);
    if (!state)
        return 0;
#define X(name) Py_CLEAR(state->name);
    CD_PY_STATE_OBJECTS(X)
#undef X
    return 0;
}

static void free_state(void *module)
{
    clear_state((PyObject *)module);
}

static int execute(PyObject *module)
{
    static int (*const rooms[])(PyObject *) = {
        cd_py_errors_add,
        cd_py_array_add,
        cd_py_array_pickle_add,
        cd_py_redop_add,
        cd_py_recorder_add,
        cd_py_group_add,
        cd_py_host_side_add,
        cd_py_work_add,
        cd_py_reductions_add,
        cd_py_moves_add,
        cd_py_p2p_add,
        cd_py_arena_add,
        cd_py_reducer_add,
        cd_py_gpu_add,
        cd_py_sampler_add,
        cd_py_settings_add,
        cd_py_store_add,
    };
    cd_host_hold_standard(); /* what is logged goes to descriptor 2, which must be no connection */
    for (size_t i = 0; i < sizeof rooms / sizeof *rooms; i++)
        if (rooms[i](module) < 0)
            return -1;
    return 0;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, execute},
#ifdef Py_mod_multiple_interpreters
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED}, /* NumPy is not */
#endif
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_USED},
#endif
    {0, NULL},
};

struct PyModuleDef cd_py_module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "cdist._core",
    .m_doc = "The C core of cdist. Use the names of the package cdist; those here may change.",
    .m_size = sizeof(cd_py_state),
    .m_slots = slots,
    .m_traverse = traverse_state,
    .m_clear = clear_state,
    .m_free = free_state,
};

PyMODINIT_FUNC PyInit__core(void)
{
    return PyModuleDef_Init(&cd_py_module);
}
