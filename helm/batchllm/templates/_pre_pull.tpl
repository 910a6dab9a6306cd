{{/* The pre-pull Job's pod; apart from the Job, whose name contains its digest. */}}

{{- define "batchllm.prePull.pod" -}}
{{- $cache := .Values.modelCache -}}
metadata:
  labels:
    app.kubernetes.io/name: batchllm
    app.kubernetes.io/component: pre-pull
spec:
  restartPolicy: Never
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- with include "batchllm.imagePullSecrets" . }}
  imagePullSecrets:
    {{- trim . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- include "batchllm.podSecurityContext" (dict "root" . "user" .Values.cpu.runAsUser "group" .Values.cpu.runAsGroup) | nindent 4 }}
  containers:
    - name: pre-pull
      image: {{ include "batchllm.image" (dict "root" . "image" "airflow") | quote }}
      imagePullPolicy: {{ .Values.images.pullPolicy }}
      command: [python, -c]
      args:
        - |
          {{- .Files.Get "files/pre_pull.py" | trim | nindent 10 }}
        - {{ toJson $cache.prePull.models | quote }}
      env:
        {{- $env := dict "HOME" "/tmp" "HF_HOME" "/models" "HF_HUB_DISABLE_TELEMETRY" "1" }}
        {{- range $name, $value := merge (dict) .Values.pods.env $env }}
        - {name: {{ $name }}, value: {{ $value | quote }}}
        {{- end }}
      {{- with .Values.secrets.huggingFace }}
      envFrom:
        - secretRef:
            name: {{ . | quote }}
      {{- end }}
      resources:
        {{- toYaml $cache.prePull.resources | nindent 8 }}
      securityContext:
        {{- include "batchllm.containerSecurityContext" . | nindent 8 }}
      volumeMounts:
        - {name: scratch, mountPath: /tmp}
        - {name: models, mountPath: /models}
        {{- include "batchllm.extraVolumeMounts" . | nindent 8 }}
  volumes:
    - name: scratch
      emptyDir: {}
    - name: models
      persistentVolumeClaim:
        claimName: {{ include "batchllm.modelClaimName" . | quote }}
    {{- with .Values.pods.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}
